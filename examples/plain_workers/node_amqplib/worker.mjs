// A worker with no SDK: amqplib and nothing else. `npm install`, then
// `node worker.mjs amqp://localhost executador_relatorio`
//
// ORÁCULO makes the queues, so this one only checks for them and waits until they are there. A command leaves its queue
// when its answer is confirmed; one that cannot be read leaves it when it is confirmed in `<queue>.dlq`. To reject it
// would do where ORÁCULO made the queue; a queue that somebody made without dead letters would drop it.

import { setTimeout as sleep } from "node:timers/promises";
import amqp from "amqplib";

const url = process.argv[2] ?? process.env.ORACULO_BROKER_URL ?? "amqp://localhost";
const queue = process.argv[3] ?? process.env.FILA;

/** The work itself. An exception here is an answer too. */
async function handle(command) {
  return { status: "ok", resultado: { recebido: command.payload } };
}

/** As JSON: a result that JSON cannot hold (a BigInt) is a failure of the work, too. */
async function answerTo(command) {
  const { correlation_id, tarefa, tentativa } = command;
  const tipo_evento = command.tipo_evento === "iniciar_coleta" ? "resultado_coleta" : "resultado_execucao";
  const answer = { correlation_id, tarefa, tentativa, tipo_evento, timestamp: new Date().toISOString() };
  try {
    return JSON.stringify({ ...answer, payload: await handle(command) });
  } catch (error) {
    return JSON.stringify({ ...answer, payload: { status: "erro", erros: [String(error)] } });
  }
}

function readCommand(message) {
  const command = JSON.parse(message.content.toString());
  if (!command?.correlation_id || !command.tipo_evento) throw new Error("correlation_id or tipo_evento is missing");
  command.responder_em ??= "resultados";
  const size = typeof command.responder_em === "string" ? Buffer.byteLength(command.responder_em) : 0;
  if (size < 1 || size > 255) throw new Error("responder_em is not the name of a queue");
  return command;
}

async function publish(channel, target, content, options) {
  channel.sendToQueue(target, content, { persistent: true, mandatory: true, ...options });
  await channel.waitForConfirms();
  if (channel.returned) throw new Error(`a queue does not exist: ${target}, or another that was published to`);
}

async function onMessage(channel, message) {
  let command;
  try {
    command = readCommand(message);
  } catch (error) {
    console.log(`not a command, so it goes to the dead letters: ${error.message}`);
    const headers = { "x-oraculo-reason": `not a command: ${error.message}`.slice(0, 1000) };
    await publish(channel, `${queue}.dlq`, message.content, { headers, timestamp: Math.floor(Date.now() / 1000) });
    channel.ack(message);
    return;
  }
  await publish(channel, command.responder_em, Buffer.from(await answerTo(command)));
  channel.ack(message); // only now: the server has confirmed the answer
}

/** On channels of its own: the server closes one on which a queue was named that is not there. */
async function ensureDeadLetters(connection, name) {
  const looking = await connection.createChannel();
  looking.on("error", () => {}); // told by the call itself
  try {
    await looking.checkQueue(name);
    await looking.close();
  } catch (error) {
    if (error.code !== 404) throw error;
    const making = await connection.createChannel();
    making.on("error", () => {});
    // As ORÁCULO makes it.
    await making.assertQueue(name, { arguments: { "x-queue-type": "quorum", "x-delivery-limit": 1_000_000_000 } });
    await making.close();
  }
}

async function work() {
  const connection = await amqp.connect(url);
  try {
    const channel = await connection.createConfirmChannel();
    channel.on("return", () => (channel.returned = true));
    for (const each of [connection, channel]) each.on("error", (error) => console.log(error.message));
    await channel.checkQueue(queue);
    await ensureDeadLetters(connection, `${queue}.dlq`);
    await channel.prefetch(10);
    await new Promise((resolve, reject) => {
      channel.on("close", resolve);
      const onDelivery = (message) =>
        message ? onMessage(channel, message).catch(reject) : reject(new Error("the queue was deleted"));
      channel.consume(queue, onDelivery).then(() => console.log(`waiting for work on ${queue}`), reject);
    });
  } finally {
    await connection.close().catch(() => {}); // what was not acked comes again
  }
}

if (!queue) throw new Error("which queue? node worker.mjs amqp://localhost <queue>");
for (;;) {
  await work().catch((error) => console.log(`trying again soon: ${error.message}`));
  await sleep(1000);
}
