// A worker with no SDK: amqplib and nothing else. `npm install`, then
// `node worker.mjs amqp://localhost executador_relatorio`
//
// ORÁCULO makes the queues, so this one only checks for them and waits until they are there. A command leaves its queue
// when its answer is confirmed; one that cannot be read is rejected, and RabbitMQ moves it to `<queue>.dlq`.

import { setTimeout as sleep } from "node:timers/promises";
import amqp from "amqplib";

const url = process.argv[2] ?? process.env.ORACULO_BROKER_URL ?? "amqp://localhost";
const queue = process.argv[3] ?? process.env.FILA;

/** The work itself. An exception here is an answer too. */
async function handle(command) {
  return { status: "ok", resultado: { recebido: command.payload } };
}

async function answerTo(command) {
  const payload = await handle(command).catch((error) => ({ status: "erro", erros: [String(error)] }));
  const { correlation_id, tarefa, tentativa } = command;
  const tipo_evento = command.tipo_evento === "iniciar_coleta" ? "resultado_coleta" : "resultado_execucao";
  return { correlation_id, tarefa, tentativa, tipo_evento, payload, timestamp: new Date().toISOString() };
}

function readCommand(message) {
  const command = JSON.parse(message.content.toString());
  if (!command?.correlation_id || !command.tipo_evento) throw new Error("correlation_id or tipo_evento is missing");
  return command;
}

async function onMessage(channel, message) {
  let command;
  try {
    command = readCommand(message);
  } catch (error) {
    console.log(`not a command, so it goes to the dead letters: ${error.message}`);
    channel.reject(message, false);
    return;
  }
  const answer = Buffer.from(JSON.stringify(await answerTo(command)));
  channel.sendToQueue(command.responder_em ?? "resultados", answer, { persistent: true, mandatory: true });
  await channel.waitForConfirms();
  if (channel.returned) throw new Error("the queue for the answer does not exist");
  channel.ack(message); // only now: the server has confirmed the answer
}

async function work() {
  const connection = await amqp.connect(url);
  try {
    const channel = await connection.createConfirmChannel();
    channel.on("return", () => (channel.returned = true));
    for (const each of [connection, channel]) each.on("error", (error) => console.log(error.message));
    await channel.checkQueue(queue);
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
