// A worker of BullMQ that knows nothing of ORÁCULO: `node worker.mjs URL PREFIX QUEUE…`.
// What it does with a job, the job's data says (`faz`), so that one worker serves all tests. OPTIONS, as JSON, are
// the worker's own; each start of a job is written to the file JOURNAL.

import { appendFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { UnrecoverableError, Worker } from "bullmq";
import Redis from "ioredis";

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

// Starts the workers, says when they are ready, and returns what closes them at once.
export async function work([url, prefix, ...queues], environment, say) {
  const handle = async (job) => {
    const line = JSON.stringify({ fila: job.queueName, id: job.id, nome: job.name, dados: job.data });
    if (environment.JOURNAL) appendFileSync(environment.JOURNAL, `${line}\n`);
    const action = job.data.faz ?? job.data.entrada?.faz ?? "eco";
    return actions[action](job);
  };
  const connection = new Redis(url, { maxRetriesPerRequest: null });
  connection.on("error", (error) => say(`redis: ${error.message}`));
  const options = JSON.parse(environment.OPTIONS ?? "{}");
  const workers = queues.map((queue) => new Worker(queue, handle, { connection, prefix, concurrency: 10, ...options }));
  for (const worker of workers) {
    worker.on("error", (error) => say(`worker: ${error.message}`));
    await worker.waitUntilReady();
  }
  say("ready");
  return async () => {
    await Promise.all(workers.map((worker) => worker.close(true)));
    connection.disconnect();
  };
}

if (process.argv[1] === fileURLToPath(import.meta.url)) await work(process.argv.slice(2), process.env, console.log);
