// What an operator does to a queue, with the arguments URL PREFIX QUEUE ACTION. Says one JSON line when it is done.

import { Queue } from "bullmq";
import Redis from "ioredis";

export async function administer([url, prefix, name, action, ...rest], environment, say, end) {
  const connection = new Redis(url, { maxRetriesPerRequest: null });
  const queue = new Queue(name, { connection, prefix });
  const actions = {
    pausa: () => queue.pause(),
    retoma: () => queue.resume(),
    adiciona: async (data, options) => (await queue.add("job", JSON.parse(data), JSON.parse(options))).id,
  };
  say(JSON.stringify({ feito: (await actions[action](...rest)) ?? null }));
  end();
  return async () => {
    await queue.close();
    connection.disconnect();
  };
}
