// An application that adds a job and looks at what becomes of it: `node client.mjs URL PREFIX QUEUE DATA [OPTIONS]`.
// Prints one JSON line for each thing that happens to the job, the last of them its end.

import { Queue, QueueEvents } from "bullmq";
import Redis from "ioredis";

const [url, prefix, name, data, options = "{}"] = process.argv.slice(2);
const connect = () => new Redis(url, { maxRetriesPerRequest: null });
const tell = (line) => console.log(JSON.stringify(line));

const queue = new Queue(name, { connection: connect(), prefix });
// From the beginning: when it says that it is ready it has not begun to listen, and a job can be over before that.
const events = new QueueEvents(name, { connection: connect(), prefix, lastEventId: "0-0" });
await events.waitUntilReady();

let id;
const early = [];
const ofOurs = (handle) => (event) => (id === undefined ? early.push([handle, event]) : event.jobId === id && handle(event));
const finish = (line) => {
  tell(line);
  process.exit(0);
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
