// What the Next.js application does: it adds a job to `orchestrator-queue`, and follows it as it follows any job.
//
//   node app.mjs redis://localhost:6379 promotional-video-full

import { Queue, QueueEvents } from "bullmq";
import Redis from "ioredis";

const [url = "redis://localhost:6379", pipelineName = "promotional-video-full", prefix = "bull"] = process.argv.slice(2);
const connect = () => new Redis(url, { maxRetriesPerRequest: null });

const queue = new Queue("orchestrator-queue", { connection: connect(), prefix });
const events = new QueueEvents("orchestrator-queue", { connection: connect(), prefix });
await events.waitUntilReady();
events.on("progress", ({ jobId, data }) => console.error(`job ${jobId}: ${data} %`));

const queueManager = { addJob: (name, data) => queue.add(name, data) };
const job = await queueManager.addJob("orchestrator-queue", { jobId: "6710a2", pipelineName });

try {
  const aggregate = await job.waitUntilFinished(events);
  console.log(JSON.stringify(aggregate));
  process.exit(0);
} catch (error) {
  console.error(`failed: ${error.message}`);
  process.exit(1);
}
