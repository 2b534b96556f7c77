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

async function answerTo(command) {
  const { correlation_id, tipo_evento, tarefa, tentativa } = command;
  if (!correlation_id || !tipo_evento) throw new Error("correlation_id and tipo_evento are missing");
  const payload = await handle(command).catch((error) => ({ status: "erro", erros: [String(error)] }));
  return {
    correlation_id,
    tarefa, // left out by JSON.stringify where the command has none
    tentativa,
    tipo_evento: tipo_evento === "iniciar_coleta" ? "resultado_coleta" : "resultado_execucao",
    payload,
    timestamp: new Date().toISOString(),
  };
}

// From id 0: what was published before the first worker came is for it too.
async function makeQueue() {
  try {
    await redis.xgroup("CREATE", queue, queue, "0", "MKSTREAM");
  } catch (error) {
    if (!error.message.startsWith("BUSYGROUP")) throw error; // else it is there already
  }
}

// The answer goes out and the command leaves its queue, in one step.
async function settle(entry, target, fields) {
  const replies = await redis.multi().xadd(target, "*", ...fields).xack(queue, queue, entry).xdel(queue, entry).exec();
  const failed = replies.find(([error]) => error);
  if (failed) throw failed[0];
}

async function work(entry, fields, deliveries = 1) {
  const at = fields.findIndex((field, index) => index % 2 === 0 && field.toString() === "body");
  let target, answer;
  try {
    if (deliveries > MOST_DELIVERIES) throw new Error(`delivered ${deliveries} times`);
    if (at < 0) throw new Error("there is no field 'body'");
    const command = JSON.parse(utf8.decode(fields[at + 1]));
    answer = JSON.stringify(await answerTo(command));
    target = command.responder_em ?? "resultados";
    if (typeof target !== "string") throw new Error("responder_em must be a string");
  } catch (error) {
    // No command that anybody could answer: never dropped.
    return settle(entry, `${queue}.dlq`, [...fields, "reason", String(error)]);
  }
  return settle(entry, target, ["body", answer]);
}

// As bytes: what is no text must come to the dead letters as it was.
async function read(after) {
  const taking = ["GROUP", queue, name, "COUNT", 10, "BLOCK", 2000, "STREAMS", queue, after];
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
