// Many programs in one process, because the packages take a second to load: each line of its input starts or ends one.
// `{"n", "script", "arguments", "environment", "log"}` starts a program, `{"n"}` ends it. What it says goes to its log;
// a last line `ended` there means that it has ended by itself.

import { appendFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { administer } from "./admin.mjs";
import { follow } from "./client.mjs";
import { work } from "./worker.mjs";

const programs = { "admin.mjs": administer, "client.mjs": follow, "worker.mjs": work };
const closing = new Map(); // by number, a promise of what closes the program

process.on("unhandledRejection", (error) => console.error(`rejection: ${error?.stack ?? error}`));
createInterface({ input: process.stdin })
  .on("line", async (line) => {
    const { n, script, arguments: given, environment, log } = JSON.parse(line);
    if (script === undefined) {
      const close = await closing.get(n);
      closing.delete(n);
      await close?.();
      return;
    }
    const say = (text) => appendFileSync(log, `${text}\n`);
    const end = () => say("ended");
    closing.set(n, programs[script](given, environment, say, end).catch((error) => say(`failed: ${error.stack}`)));
  })
  .on("close", () => process.exit(0));
