// A worker of BullMQ that knows nothing of ORÁCULO: `node worker.mjs URL PREFIX QUEUE…`.
// What it does with a job, the job's data says (`faz`), so that one worker serves all tests. OPTIONS, as JSON, are
// the worker's own; each start of a job is written to the file JOURNAL.

import { appendFileSync } from "node:fs";
import { UnrecoverableError, Worker } from "bullmq";
import Redis from "ioredis";

const [url, prefix, ...queues] = process.argv.slice(2);
const options = JSON.parse(process.env.OPTIONS ?? "{}");

const actions = {
  eco: (job) => ({ recebido: job.data, nome: job.name }),
  devolve: (job) => job.data.valor,
  falha: (job) => {
    throw new Error(job.data.motivo ?? "não deu");
  },
  joga: (job) => {
    throw job.data.valor; // no Error
  },
  irrecuperavel: () => {
    throw new UnrecoverableError("nunca vai dar");
  },
  falha_duas_vezes: (job) => {
    if (job.attemptsMade < 2) throw new Error(`tentativa ${job.attemptsMade + 1}`);
    return { tentativas: job.attemptsMade + 1 };
  },
  progride: async (job) => {
    for (const progress of job.data.progressos) await job.updateProgress(progress);
    return { ok: true };
  },
  progride_e_pendura: async (job) => {
    for (const progress of job.data.progressos) await job.updateProgress(progress);
    await new Promise(() => {});
  },
  demora: async (job) => {
    await new Promise((done) => setTimeout(done, job.data.ms));
    return { demorou: job.data.ms };
  },
  pendura: () => new Promise(() => {}),
  pendura_uma_vez: (job) => (job.attemptsStarted > 1 ? { inicios: job.attemptsStarted } : new Promise(() => {})),
};

async function handle(job) {
  const line = JSON.stringify({ fila: job.queueName, id: job.id, nome: job.name, dados: job.data });
  if (process.env.JOURNAL) appendFileSync(process.env.JOURNAL, `${line}\n`);
  const action = job.data.faz ?? job.data.entrada?.faz ?? "eco";
  return actions[action](job);
}

const connection = new Redis(url, { maxRetriesPerRequest: null });
connection.on("error", (error) => console.error(`redis: ${error.message}`));
for (const queue of queues) {
  const worker = new Worker(queue, handle, { connection, prefix, concurrency: 10, ...options });
  worker.on("error", (error) => console.error(`worker: ${error.message}`));
  await worker.waitUntilReady();
}
console.log("ready");
