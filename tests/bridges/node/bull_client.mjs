// An application that adds a job with old Bull and looks at what becomes of it:
// `node bull_client.mjs URL PREFIX QUEUE DATA [OPTIONS]`.

import Bull from "bull";

const [url, prefix, name, data, options = "{}"] = process.argv.slice(2);
const queue = new Bull(name, url, { prefix });
const tell = (line) => console.log(JSON.stringify(line));
await queue.isReady();
queue.on("global:progress", (_, progress) => tell({ evento: "progresso", progresso: progress }));
const job = await queue.add(JSON.parse(data), JSON.parse(options));
tell({ evento: "adicionado", id: String(job.id) });
try {
  const value = await job.finished();
  tell({ evento: "concluido", valor: value });
} catch (error) {
  tell({ evento: "falhou", motivo: error.message });
}
process.exit(0);
