// Pushes a line with a foreign client of Loki's push API.
//   node push.mjs pino|winston BASE_URL TOKEN LABELS LINE      LABELS: a JSON object. NODE_EXTRA_CA_CERTS: authorities, PEM.
import { createRequire } from "node:module";
import { join } from "node:path";

const [client, base, token, labelsJson, line] = process.argv.slice(2);
const require = createRequire(join(process.env.CLIENT_FOLDER, "package.json"));
const labels = JSON.parse(labelsJson);
const headers = { Authorization: `Bearer ${token}` };

/** Sends one line as JSON; fails where the line is refused. */
async function pushWithPino() {
  const pino = require("pino");
  const { pinoLoki } = require("pino-loki");
  const stream = pinoLoki({ host: `${base}/`, headers, labels, batching: false, silenceErrors: false, replaceTimestamp: true });
  const logger = pino(stream);
  logger.info(line);
  stream.end();
  await new Promise((resolve, reject) => stream.once("close", resolve).once("error", reject));
}

/** Sends one line as protobuf; fails where the line is refused. */
async function pushWithWinston() {
  const winston = require("winston");
  const LokiTransport = require("winston-loki");
  const refused = new Promise((_, reject) => {
    const transport = new LokiTransport({ host: base, headers, labels, interval: 1, onConnectionError: reject, gracefulShutdown: false });
    const logger = winston.createLogger({ transports: [transport], format: winston.format.json() });
    logger.info(line);
    transport.flush().then(() => process.exit(0), reject);
  });
  await refused;
}

await (client === "pino" ? pushWithPino() : pushWithWinston()).catch((error) => {
  console.error(String(error));
  process.exit(1);
});
