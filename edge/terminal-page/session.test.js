import assert from "node:assert/strict";
import { test } from "node:test";

import { ACKNOWLEDGES_EVERY, INPUT_AT_MOST, Session } from "./session.js";

/** A fake environment: its clock advances on request, and its sockets send what the test gives them. */
class World {
  constructor() {
    this.time = 0;
    this.timers = [];
    this.states = [];
    this.sockets = [];
    this.asked = [];
    this.undrawn = [];
    this.notices = [];
    this.modes = [];
    this.kept = undefined;
    this.refusal = null;
    this.screen = {
      write: (bytes, drawn) => this.undrawn.push(drawn),
      size: () => ({ columns: 100, rows: 30 }),
      notice: (text) => this.notices.push(text),
    };
  }
  mint = async (session) => {
    this.asked.push(session);
    if (this.refusal) throw this.refusal;
    return { token: `t${this.asked.length}`, session_id: session ?? "s", websocket_url: "wss://gpu.example/ws" };
  };
  connect = (url, protocols) => {
    const socket = { url, protocols, readyState: 1, sent: [], closed: false };
    socket.send = (message) => socket.sent.push(message);
    socket.close = () => (socket.closed = true);
    this.sockets.push(socket);
    return socket;
  };
  tell = (state) => this.states.push(state);
  recorded = (mode) => this.modes.push(mode);
  keep = (session) => (this.kept = session);
  after = (run, ms) => {
    const timer = { run, at: this.time + ms };
    this.timers.push(timer);
    return timer;
  };
  cancel = (timer) => (this.timers = this.timers.filter((it) => it !== timer));
  now = () => this.time;
  chance = () => 0.5;

  get socket() {
    return this.sockets.at(-1);
  }
  get state() {
    return this.states.at(-1);
  }
  says(message) {
    this.socket.onmessage({ data: JSON.stringify(message) });
  }
  shows(length) {
    this.socket.onmessage({ data: new ArrayBuffer(length) });
  }
  attaches(position = 0, lost_bytes = 0) {
    this.says({ type: "attached", session_id: "s", attachment: 1, position, lost_bytes, recording: "best-effort" });
  }
  closes(code) {
    this.socket.onclose({ code });
  }
  draws() {
    this.undrawn.splice(0).forEach((drawn) => drawn());
  }
  async passes(ms) {
    const until = this.time + ms;
    for (;;) {
      const next = this.timers.sort((one, other) => one.at - other.at)[0];
      if (!next || next.at > until) break;
      this.cancel(next);
      this.time = next.at;
      next.run();
      await settled();
    }
    this.time = until;
  }
  controls() {
    return this.socket.sent.filter((it) => typeof it === "string").map((it) => JSON.parse(it));
  }
}

const settled = () => new Promise((done) => setImmediate(done));

async function connected(session = null) {
  const world = new World();
  const it = new Session(world, session);
  await it.open();
  world.attaches();
  return [world, it];
}

test("it connects with the documented subprotocols and says how large it is", async () => {
  const [world] = await connected();
  assert.deepEqual(world.socket.protocols, ["gpu.terminal.v1", "token.t1", "from.0"]);
  assert.deepEqual(world.states.map((state) => state.name), ["connecting", "connected"]);
  assert.deepEqual(world.controls(), [{ type: "ack", position: 0 }, { type: "resize", columns: 100, rows: 30 }]);
  assert.equal(world.kept, "s");
});

test("only what is drawn is acknowledged", async () => {
  const [world] = await connected();
  const acks = () => world.controls().filter((it) => it.type === "ack").map((it) => it.position);
  world.shows(ACKNOWLEDGES_EVERY);
  world.shows(10);
  assert.deepEqual(acks(), [0]);
  world.draws();
  assert.deepEqual(acks(), [0, ACKNOWLEDGES_EVERY]);
});

test("a paste goes out in parts, and nothing goes out while there is no connection", async () => {
  const [world, session] = await connected();
  const before = world.socket.sent.length;
  session.type(new Uint8Array(2 * INPUT_AT_MOST + 1));
  assert.deepEqual(world.socket.sent.slice(before).map((it) => it.length), [INPUT_AT_MOST, INPUT_AT_MOST, 1]);
  const lost = world.socket;
  world.closes(1006);
  const sent = lost.sent.length;
  session.type(new Uint8Array(1));
  assert.equal(lost.sent.length, sent);
});

test("after a loss it goes on with the same session at the byte where it was", async () => {
  const [world] = await connected();
  world.shows(1000);
  world.closes(1006);
  await world.passes(0);
  assert.deepEqual(world.asked, [null, "s"]);
  assert.deepEqual(world.socket.protocols, ["gpu.terminal.v1", "token.t2", "from.1000"]);
  world.attaches(1200, 200);
  assert.match(world.notices[0], /200 bytes/);
  world.shows(10);
  world.closes(1012);
  await world.passes(20_000);
  assert.equal(world.socket.protocols[2], "from.1210");
});

test("it waits longer each time, says how long, and can be hurried", async () => {
  const [world, session] = await connected();
  world.refusal = { kind: "again", why: "The service cannot be reached.", seconds: 0, next: null };
  world.closes(1006);
  await world.passes(0);
  assert.deepEqual(world.state, { name: "waiting", seconds: 1, why: "The service cannot be reached." });
  await world.passes(1000);
  assert.equal(world.state.seconds, 2);
  await world.passes(30_000);
  assert.equal(world.state.name, "waiting");
  assert.ok(world.asked.length < 10, `${world.asked.length} tries`);
  const tries = world.asked.length;
  world.refusal = null;
  session.hurry();
  await settled();
  assert.equal(world.asked.length, tries + 1);
  world.attaches();
  assert.equal(world.state.name, "connected");
});

test("it waits as long as the service says", async () => {
  const world = new World();
  world.refusal = { kind: "again", why: "Too many.", seconds: 30, next: null };
  await new Session(world).open();
  await world.passes(29_500);
  assert.equal(world.asked.length, 1);
  await world.passes(1000);
  assert.equal(world.asked.length, 2);
});

test("a connection that falls silent is closed and replaced", async () => {
  const [world] = await connected();
  await world.passes(15_000);
  assert.ok(world.controls().some((it) => it.type === "ping"));
  world.says({ type: "pong" });
  await world.passes(25_000);
  assert.equal(world.sockets.length, 1);
  await world.passes(10_000);
  assert.equal(world.sockets[0].closed, true);
  assert.equal(world.sockets.length, 2);
});

test("what ended stays ended, and says how", async () => {
  const [world, session] = await connected();
  world.says({ type: "exit", code: 7, signal: null });
  world.closes(1000);
  await world.passes(60_000);
  assert.deepEqual(world.state, { name: "closed", why: "The program ended with 7.", next: "new" });
  assert.deepEqual([world.asked.length, world.kept], [1, null]);
  await session.openNew();
  assert.deepEqual(world.asked, [null, null]);
});

test("what is drawn late of an earlier session is not acknowledged in the next", async () => {
  const [world, session] = await connected();
  world.shows(10 * ACKNOWLEDGES_EVERY);
  world.closes(1000);
  world.mint = async () => ({ token: "t", session_id: "another", websocket_url: "wss://gpu.example/ws" });
  await session.openNew();
  world.attaches();
  world.draws();
  assert.deepEqual(world.controls().filter((it) => it.type === "ack"), [{ type: "ack", position: 0 }]);
});

test("a second tab that takes the session over is not fought", async () => {
  const [world, session] = await connected();
  world.closes(4409);
  await world.passes(60_000);
  assert.equal(world.state.next, "take");
  assert.equal(world.asked.length, 1);
  await session.open();
  assert.deepEqual(world.asked, [null, "s"]);
});

test("a token that holds no more asks who is there, and the session is gone on with", async () => {
  const [world, session] = await connected();
  world.refusal = { kind: "sign-in", why: "It does not hold.", next: null };
  world.closes(1006);
  await world.passes(60_000);
  assert.equal(world.state.name, "signed-out");
  world.refusal = null;
  await session.open();
  assert.equal(world.asked.at(-1), "s");
});

test("a reloaded page shows the output from the beginning and answers no old questions", async () => {
  const [world, session] = await connected("s");
  assert.equal(world.socket.protocols[2], "from.0");
  const before = world.socket.sent.length;
  session.type(new Uint8Array(3));
  assert.equal(world.socket.sent.length, before);
  await world.passes(600);
  session.type(new Uint8Array(3));
  assert.equal(world.socket.sent.length, before + 1);
});

test("late messages of an earlier connection are ignored", async () => {
  const [world, session] = await connected();
  const { onclose } = world.socket;
  await session.open();
  world.attaches();
  onclose({ code: 1000 });
  assert.equal(world.state.name, "connected");
});

test("a node that is not in contact is shown, and takes no input until it is back", async () => {
  const [world, session] = await connected();
  world.says({ type: "waiting_for_node" });
  assert.deepEqual(world.state, { name: "away", why: "The node is not in contact; waiting for it." });
  const before = world.socket.sent.length;
  session.type(new Uint8Array([1]));
  assert.equal(world.socket.sent.length, before);
  world.attaches();
  assert.equal(world.state.name, "connected");
  session.type(new Uint8Array([1]));
  assert.ok(world.socket.sent.length > before);
});

test("a user is informed of the recording at the beginning and when it changes", async () => {
  const world = new World();
  const session = new Session(world);
  await session.open();
  world.attaches();
  world.says({ type: "recording", mode: "off" });
  world.says({ type: "recording", mode: "strict" });
  assert.deepEqual(world.modes, ["best-effort", "off", "strict"]);
});
