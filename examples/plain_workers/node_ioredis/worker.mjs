// A worker with no SDK: ioredis and nothing else.
//
//   npm install && node worker.mjs redis://localhost:6379/0 escavador_youtube
//
// A queue is a stream of the same name, with a consumer group of the same name and the JSON in field `body`. What was
// handled is acked and deleted. The name of the consumer stays the same over a restart, so that the worker finds what
// it had taken and not finished; give each worker of a queue its own, as the third argument.

import { hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import Redis from "ioredis";

const MOST_DELIVERIES = 20;
const utf8 = new TextDecoder("utf-8", { fatal: true });
const [url, queue, name = `plain-${hostname()}`] = process.argv.slice(2);
if (!queue) {
  console.error("usage: node worker.mjs redis://host:port/0 queue [consumer]");
  process.exit(2);
}
const redis = new Redis(url, {
  maxRetriesPerRequest: null, // an outage is waited out, however long
  reconnectOnError: (error) => error.message.startsWith("READONLY"), // the name may lead to the new master by now
});
let isLost = false; // and with the connection perhaps what was on its way
redis.on("close", () => (isLost = true));
redis.on("error", (error) => console.error(`redis: ${error.message}`)); // it connects again by itself

// The work itself. An exception here is an answer too.
async function handle(command) {
  return { status: "ok", resultado: { recebido: command.payload } };
}

// As JSON: a result that JSON cannot hold (a BigInt) is a failure of the work, too.
async function answerTo(command) {
  const { correlation_id, tipo_evento, tarefa, tentativa } = command;
  if (!correlation_id || !tipo_evento) throw new Error("correlation_id and tipo_evento are missing");
  const answer = {
    correlation_id,
    tarefa, // left out by JSON.stringify where the command has none
    tentativa,
    tipo_evento: tipo_evento === "iniciar_coleta" ? "resultado_coleta" : "resultado_execucao",
    timestamp: new Date().toISOString(),
  };
  try {
    return JSON.stringify({ ...answer, payload: await handle(command) });
  } catch (error) {
    return JSON.stringify({ ...answer, payload: { status: "erro", erros: [String(error)] } });
  }
}

// From id 0: what was published before the first worker came is for it too.
async function makeQueue() {
  try {
    await redis.xgroup("CREATE", queue, queue, "0", "MKSTREAM");
  } catch (error) {
    if (!error.message.startsWith("BUSYGROUP")) throw error; // else it is there already
  }
}

// The command leaves its queue once its answer is in another: not in one transaction, which Redis goes on with when a
// part of it fails.
async function settle(entry, target, fields) {
  await redis.xadd(target, "*", ...fields);
  const replies = await redis.multi().xack(queue, queue, entry).xdel(queue, entry).exec();
  const failed = replies.find(([error]) => error);
  if (failed) throw failed[0];
}

const bury = (entry, fields, error) => settle(entry, `${queue}.dlq`, [...fields, "reason", String(error)]);

async function work(entry, fields, deliveries = 1) {
  const at = fields.findIndex((field, index) => index % 2 === 0 && field.toString() === "body");
  let target, answer;
  try {
    if (deliveries > MOST_DELIVERIES) throw new Error(`delivered ${deliveries} times`);
    if (at < 0) throw new Error("there is no field 'body'");
    const command = JSON.parse(utf8.decode(fields[at + 1]));
    target = command.responder_em || "resultados";
    if (typeof target !== "string") throw new Error("responder_em must be a string");
    answer = await answerTo(command);
  } catch (error) {
    return bury(entry, fields, error); // no command that anybody could answer: never dropped
  }
  try {
    await settle(entry, target, ["body", answer]);
  } catch (error) {
    if (!error.message.startsWith("WRONGTYPE")) throw error;
    await bury(entry, fields, error); // responder_em names something else than a queue
  }
}

// As bytes: what is no text must come to the dead letters as it was.
async function read(after) {
  // What was taken before is read one by one: each look counts as a delivery of all that it shows.
  const taking = ["GROUP", queue, name, "COUNT", after === ">" ? 10 : 1, "BLOCK", 2000, "STREAMS", queue, after];
  try {
    const found = await redis.xreadgroupBuffer(...taking);
    return found ? found[0][1] : [];
  } catch (error) {
    if (!/^(NOGROUP|UNBLOCKED)/.test(error.message)) throw error;
    await makeQueue(); // all was flushed, or the server is back without its data
    return [];
  }
}

async function serve() {
  await makeQueue();
  isLost = false;
  for (let unfinished; (unfinished = await read("0")).length > 0; ) {
    // What this worker had taken before it stopped, or lost its connection.
    for (const [entry, fields] of unfinished) {
      const [about] = await redis.xpending(queue, queue, entry, entry, 1, name);
      if (about) await work(entry, fields ?? [], about[3]); // else another has claimed it
    }
  }
  console.log(`waiting for work on ${queue}`);
  while (!isLost) {
    for (const [entry, fields] of await read(">")) await work(entry, fields);
  }
}

for (;;) {
  // The server is full, say: it finds again what it had taken.
  await serve().catch((error) => console.error(`trying again soon: ${error.message}`));
  await sleep(1000);
}
