// An application that adds a job and looks at what becomes of it: `node client.mjs URL PREFIX QUEUE DATA [OPTIONS]`.
// Prints one JSON line for each thing that happens to the job, the last of them its end.

import { fileURLToPath } from "node:url";
import { Queue, QueueEvents } from "bullmq";
import Redis from "ioredis";

// Returns what disconnects it, also before the job has ended; `end` is called when it has.
export async function follow([url, prefix, name, data, options = "{}"], environment, say, end) {
  const tell = (line) => say(JSON.stringify(line));
  const connections = [new Redis(url, { maxRetriesPerRequest: null }), new Redis(url, { maxRetriesPerRequest: null })];
  for (const connection of connections) connection.on("error", (error) => say(`redis: ${error.message}`));
  const queue = new Queue(name, { connection: connections[0], prefix });
  // From the beginning: when it says that it is ready it has not begun to listen, and a job can be over before that.
  const events = new QueueEvents(name, { connection: connections[1], prefix, lastEventId: "0-0" });
  await events.waitUntilReady();

  let id;
  const early = [];
  const ofOurs = (handle) => (event) =>
    id === undefined ? early.push([handle, event]) : event.jobId === id && handle(event);
  const finish = (line) => {
    tell(line);
    end();
  };
  events.on("progress", ofOurs(({ data }) => tell({ evento: "progresso", progresso: data })));
  events.on("completed", ofOurs(({ returnvalue }) => finish({ evento: "concluido", valor: returnvalue })));
  events.on("failed", ofOurs(async ({ failedReason }) => {
    const job = await queue.getJob(id);
    finish({ evento: "falhou", motivo: failedReason, tentativas: job?.attemptsMade });
  }));

  const job = await queue.add("orquestrar", JSON.parse(data), JSON.parse(options));
  tell({ evento: "adicionado", id: job.id });
  id = job.id;
  for (const [handle, event] of early) if (event.jobId === id) handle(event);
  return async () => {
    await Promise.all([events.close(), queue.close()]);
    for (const connection of connections) connection.disconnect();
  };
}

if (process.argv[1] === fileURLToPath(import.meta.url))
  await follow(process.argv.slice(2), process.env, console.log, () => process.exit(0));
