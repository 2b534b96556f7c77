// The five workers of the video pipelines: BullMQ and nothing else. None of them knows that there is an orchestrator.
//
//   npm install && node workers.mjs redis://localhost:6379
//
// A job's data is the step's payload: `config` (the step's), `entrada` (what the run was started with) and
// `resultados` (of the steps that this one depends on, each `{status, resultado}`). What a worker returns is the
// step's result; an exception is its failure.

import { Worker } from "bullmq";
import Redis from "ioredis";

const [url = "redis://localhost:6379", prefix = "bull"] = process.argv.slice(2);
const connection = new Redis(url, { maxRetriesPerRequest: null });

// Put your own work here.
const workers = {
  "images-queue": async (job) => {
    await job.updateProgress(50);
    const count = job.data.config.count ?? 3;
    return { images: Array.from({ length: count }, (_, n) => `${job.data.entrada.jobId}-${n}.png`) };
  },
  "text-queue": async (job) => ({ copy: `Compre já! (${job.data.config.platform ?? "instagram"})` }),
  "voiceover-queue": async (job) => ({ audio: "voz.mp3", says: job.data.resultados.VIRAL_COPY.resultado.copy }),
  "captions-queue": async (job) => ({ captions: [job.data.resultados.VOICE_OVER.resultado.says] }),
  "video-queue": async (job) => {
    const made = Object.fromEntries(Object.entries(job.data.resultados).map(([step, { resultado }]) => [step, resultado]));
    return { video: "promocional.mp4", from: made };
  },
};

for (const [queue, work] of Object.entries(workers)) {
  const worker = new Worker(queue, work, { connection, prefix });
  worker.on("error", (error) => console.error(`${queue}: ${error.message}`));
  await worker.waitUntilReady();
}
console.log(`ready: ${Object.keys(workers).join(", ")}`);
