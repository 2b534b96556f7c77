// What an operator does to a queue: `node admin.mjs URL PREFIX QUEUE ACTION`. Prints one JSON line when it is done.

import { Queue } from "bullmq";
import Redis from "ioredis";

const [url, prefix, name, action, ...rest] = process.argv.slice(2);
const queue = new Queue(name, { connection: new Redis(url, { maxRetriesPerRequest: null }), prefix });
const actions = {
  pausa: () => queue.pause(),
  retoma: () => queue.resume(),
  adiciona: async (data, options) => (await queue.add("job", JSON.parse(data), JSON.parse(options))).id,
};
console.log(JSON.stringify({ feito: (await actions[action](...rest)) ?? null }));
process.exit(0);
