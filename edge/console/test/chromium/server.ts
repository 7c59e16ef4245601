// Serves the built console as the control plane does, with a small control plane in memory behind it.
import { existsSync, readFileSync } from "node:fs";
import { createHash } from "node:crypto";
import { createServer, type IncomingMessage, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { extname, join } from "node:path";
import type { Duplex } from "node:stream";
import { MockApi } from "../mock-api.ts";

/** The built console. */
export const DIST = process.env["GPUAAS_CONSOLE_DIST"] ?? "dist";
const POLICY = readFileSync("content-security-policy.txt", "utf8").trim();
const TYPES: Record<string, string> = { ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml" };

async function requestOf(incoming: IncomingMessage, origin: string): Promise<Request> {
  const chunks: Buffer[] = [];
  for await (const chunk of incoming) chunks.push(chunk as Buffer);
  const headers = Object.entries(incoming.headers).flatMap(([name, value]) => (typeof value === "string" ? [[name, value] as [string, string]] : []));
  const method = incoming.method ?? "GET";
  return new Request(new URL(incoming.url ?? "/", origin), { method, headers, ...(method === "GET" ? {} : { body: Buffer.concat(chunks) }) });
}

export interface ConsoleServer {
  origin: string;
  mock: MockApi;
  /** Files that are refused, as those of another release are. */
  missing: Set<string>;
  /** Paths of the API whose answers break off in their middle. */
  cut: Set<string>;
  /** The open connections for notifications, and how many there have been. */
  streams: Set<Duplex>;
  streamsOpened: number;
  /** True: connections for notifications are refused. */
  refuseStreams: boolean;
  /** Sends a notification on all of them. */
  notify: (type: string, data: object) => void;
  close: () => Promise<void>;
}

const GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/** A text frame of a server (RFC 6455, 5.2). */
function textFrame(text: string): Buffer {
  const payload = Buffer.from(text);
  const length = payload.length < 126 ? Buffer.from([payload.length]) : Buffer.from([126, payload.length >> 8, payload.length & 0xff]);
  return Buffer.concat([Buffer.from([0x81]), length, payload]);
}

function notification(type: string, data: object): Buffer {
  return textFrame(JSON.stringify({ specversion: "1.0", id: crypto.randomUUID(), source: "/gpuaas/notifications", type, time: new Date().toISOString(), data }));
}

export async function startConsole(): Promise<ConsoleServer> {
  if (!existsSync(join(DIST, "index.html"))) throw new Error("the console is not built: npm run build");
  const mock = new MockApi();
  const missing = new Set<string>();
  const cut = new Set<string>();
  let origin = "";
  const server: Server = createServer((incoming, outgoing) => {
    const path = new URL(incoming.url ?? "/", "http://console").pathname;
    if (path.startsWith("/api/") || path === "/console/logout") {
      void requestOf(incoming, origin)
        .then((request) => mock.answer(request))
        .then(async (answer) => {
          const body = Buffer.from(await answer.arrayBuffer());
          if (cut.has(path)) {
            outgoing.writeHead(answer.status, { ...Object.fromEntries(answer.headers), "Content-Length": String(body.length) });
            outgoing.write(body.subarray(0, body.length / 2), () => incoming.socket.destroy());
            return;
          }
          outgoing.writeHead(answer.status, Object.fromEntries(answer.headers));
          outgoing.end(body);
        });
      return;
    }
    if (path.startsWith("/console/assets/")) {
      const file = join(DIST, path.slice("/console/".length));
      const found = existsSync(file) && ![...missing].some((name) => path.includes(name));
      outgoing.writeHead(found ? 200 : 404, { "Content-Type": TYPES[extname(file)] ?? "application/octet-stream", "X-Content-Type-Options": "nosniff" });
      outgoing.end(found ? readFileSync(file) : undefined);
      return;
    }
    outgoing.writeHead(200, { "Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": POLICY, "Cache-Control": "no-store", "Cross-Origin-Opener-Policy": "same-origin" });
    outgoing.end(readFileSync(join(DIST, "index.html")));
  });
  const streams = new Set<Duplex>();
  const made: ConsoleServer = {
    origin: "",
    mock,
    missing,
    cut,
    streams,
    streamsOpened: 0,
    refuseStreams: false,
    notify: (type, data) => streams.forEach((stream) => stream.write(notification(type, data))),
    close: () => new Promise((closed) => { streams.forEach((stream) => stream.destroy()); server.closeAllConnections(); server.close(() => closed()); }),
  };
  server.on("upgrade", (incoming: IncomingMessage, stream: Duplex) => {
    if (made.refuseStreams) {
      stream.destroy();
      return;
    }
    const accept = createHash("sha1").update(`${String(incoming.headers["sec-websocket-key"])}${GUID}`).digest("base64");
    const head = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade", `Sec-WebSocket-Accept: ${accept}`, "Sec-WebSocket-Protocol: gpu.notifications.v1"];
    stream.write(`${head.join("\r\n")}\r\n\r\n`);
    stream.write(notification("notifications.ready", { channels: ["user", "broadcast"], expires_at: new Date(Date.now() + 3_600_000).toISOString() }));
    streams.add(stream);
    made.streamsOpened += 1;
    stream.on("close", () => streams.delete(stream));
    stream.on("end", () => stream.end());
    stream.on("error", () => streams.delete(stream));
    stream.resume();
  });
  await new Promise<void>((listening) => server.listen(0, "127.0.0.1", listening));
  origin = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  made.origin = origin;
  return made;
}
