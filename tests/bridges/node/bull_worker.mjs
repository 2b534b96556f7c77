// A worker of old Bull that knows nothing of ORÁCULO: `node bull_worker.mjs URL PREFIX QUEUE…`.

import { appendFileSync } from "node:fs";
import Bull from "bull";

const [url, prefix, ...queues] = process.argv.slice(2);

const actions = {
  eco: (job) => ({ recebido: job.data, nome: job.name }),
  falha: () => {
    throw new Error("não deu");
  },
  progride_e_pendura: async (job) => {
    for (const progress of job.data.progressos) await job.progress(progress);
    await new Promise(() => {});
  },
};

for (const name of queues) {
  const queue = new Bull(name, url, { prefix, settings: { lockDuration: 2000, stalledInterval: 1000 } });
  queue.on("error", (error) => console.error(`queue: ${error.message}`));
  queue.process(10, async (job) => {
    const line = JSON.stringify({ fila: name, id: job.id, nome: job.name, dados: job.data });
    if (process.env.JOURNAL) appendFileSync(process.env.JOURNAL, `${line}\n`);
    return actions[job.data.faz ?? job.data.entrada?.faz ?? "eco"](job);
  });
  await queue.isReady();
}
console.log("ready");
