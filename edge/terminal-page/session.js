// A terminal session as its user's end sees it: connects, counts, acknowledges what is drawn, and comes back after a loss at the byte
// where it was. It knows nothing of the page; time, network and screen are given to it.

import { ofClose } from "./messages.js";

export const PROTOCOL = "gpu.terminal.v1";
/** Drawn output is acknowledged in steps of so many bytes: well inside of the 128 KiB that come without. */
export const ACKNOWLEDGES_EVERY = 16 * 1024;
/** Of what is typed or pasted, in one message. */
export const INPUT_AT_MOST = 16 * 1024;
/** Pauses before one more try, in seconds; the last one is kept. */
const PAUSES = [0, 1, 2, 4, 8, 15];
/** A connection that lasted so long was a good one: the pauses start over. */
const GOOD_AFTER = 10_000;
/** How long the upgrade, and then the node's first word, is waited for. */
const OPENS_WITHIN = 20_000;
const ATTACHES_WITHIN = 75_000;
/** How often the other end is asked whether it is there, and after how long a silence it counts as gone. */
const ASKS_EVERY = 10_000;
const SILENT_AFTER = 30_000;
/** A reloaded page shows old output again. The questions to the terminal in it were answered when it was new. */
const QUIET_AFTER_REPLAY = 500;

/**
 * @typedef {object} World
 * @property {(session: string | null) => Promise<{token: string, session_id: string, websocket_url: string}>} mint
 *           rejects with a Verdict
 * @property {(url: string, protocols: string[]) => WebSocket} connect
 * @property {{write: (bytes: Uint8Array, drawn: () => void) => void, size: () => {columns: number, rows: number},
 *             notice: (text: string) => void}} screen
 * @property {(state: State) => void} tell
 * @property {(mode: string) => void} recorded   how what is shown from here on is recorded: "off", "best-effort" or "strict"
 * @property {(session: string | null) => void} keep   what a reloaded page needs
 * @property {(run: () => void, ms: number) => unknown} after
 * @property {(timer: unknown) => void} cancel
 * @property {() => number} now
 * @property {() => number} chance
 *
 * @typedef {{name: "connecting" | "connected"} | {name: "away", why: string} | {name: "waiting", seconds: number, why: string}
 *          | {name: "closed", why: string, next: string | null} | {name: "signed-out", why: string}} State
 */
export class Session {
  /** @type {WebSocket | null} */
  #socket = null;
  /** Output is received, drawn and acknowledged up to here. */
  #received = 0;
  #drawn = 0;
  #acknowledged = 0;
  #attached = false;
  #exit = null;
  #failures = 0;
  #connectedAt = 0;
  #heardAt = 0;
  #quietUntil = 0;
  /** Waits for the next try, or looks after the connection that there is. */
  #timer = null;
  /** Counts tries, so that what comes late of an earlier one is not taken for this one's. */
  #turn = 0;

  /** @param {World} world @param {string | null} session  to go on with, from the beginning */
  constructor(world, session = null) {
    this.world = world;
    this.id = session;
    this.replays = session !== null;
  }

  /** Begins, or goes on; at once. */
  async open() {
    this.#drop();
    const turn = ++this.#turn;
    this.world.tell({ name: "connecting" });
    let ticket;
    try {
      ticket = await this.world.mint(this.id);
    } catch (verdict) {
      return turn === this.#turn ? this.#judge(verdict) : undefined;
    }
    if (turn !== this.#turn) {
      return;
    }
    this.id = ticket.session_id;
    this.world.keep(this.id);
    const socket = this.world.connect(ticket.websocket_url, [
      PROTOCOL,
      `token.${ticket.token}`,
      `from.${this.#received}`,
    ]);
    socket.binaryType = "arraybuffer";
    this.#socket = socket;
    this.#exit = null;
    this.#heardAt = this.world.now();
    const mine = (run) => (event) => turn === this.#turn && run(event);
    socket.onmessage = mine((event) => this.#hear(event.data));
    socket.onclose = mine((event) => this.#lost(event.code));
    socket.onopen = mine(() => (this.#heardAt = this.world.now()));
    this.#lookAfter();
  }

  /** A session of its own, in place of one that is over. */
  openNew() {
    this.id = null;
    this.replays = false;
    this.#received = this.#drawn = this.#acknowledged = this.#failures = 0;
    return this.open();
  }

  /** Another session of the same allocation, from the beginning of what is kept of its output. */
  resume(id) {
    this.id = id;
    this.replays = true;
    this.#received = this.#drawn = this.#acknowledged = this.#failures = 0;
    return this.open();
  }

  /** Connects at once, if it was waiting to. */
  hurry() {
    if (this.#socket === null && this.#timer !== null) {
      this.#failures = 0;
      this.open();
    }
  }

  /** Lets go of the connection; the session itself goes on. */
  leave() {
    this.#turn += 1;
    this.#drop();
  }

  /** Ends the session and its program. */
  end() {
    this.#control({ type: "exit" });
  }

  /** @param {Uint8Array} bytes  typed or pasted */
  type(bytes) {
    if (!this.#attached || this.world.now() < this.#quietUntil) {
      return;
    }
    for (let at = 0; at < bytes.length; at += INPUT_AT_MOST) {
      this.#socket?.send(bytes.subarray(at, at + INPUT_AT_MOST));
    }
  }

  resize() {
    if (this.#attached) {
      this.#control({ type: "resize", ...this.world.screen.size() });
    }
  }

  #hear(data) {
    this.#heardAt = this.world.now();
    if (typeof data !== "string") {
      this.#show(new Uint8Array(data));
      return;
    }
    const said = JSON.parse(data);
    if (said.type === "attached") {
      this.world.recorded(said.recording);
      this.#attach(said);
    } else if (said.type === "recording") {
      this.world.recorded(said.mode);
    } else if (said.type === "waiting_for_node") {
      // What is typed meanwhile is not taken: the node would show it only when it is back.
      this.#attached = false;
      this.world.tell({ name: "away", why: "The node is not in contact; waiting for it." });
    } else if (said.type === "exit") {
      this.#exit = { code: said.code, signal: said.signal };
    }
  }

  #attach({ position, lost_bytes: lost }) {
    if (lost > 0) {
      this.world.screen.notice(`${lost} bytes of output are missing here: more came than is kept`);
    }
    if (this.replays) {
      this.replays = false;
      this.#quietUntil = this.world.now() + QUIET_AFTER_REPLAY;
    }
    this.#received = this.#drawn = this.#acknowledged = position;
    if (!this.#attached) {
      this.#attached = true;
      this.#connectedAt = this.world.now();
      this.world.tell({ name: "connected" });
    }
    // From the first acknowledgement on nothing comes that this page has no room for.
    this.#control({ type: "ack", position });
    this.resize();
  }

  #show(bytes) {
    this.#received += bytes.length;
    const [to, of] = [this.#received, this.id];
    this.world.screen.write(bytes, () => of === this.id && this.#draw(to));
  }

  #draw(to) {
    this.#drawn = Math.max(this.#drawn, to);
    if (this.#attached && this.#drawn - this.#acknowledged >= ACKNOWLEDGES_EVERY) {
      this.#acknowledged = this.#drawn;
      this.#control({ type: "ack", position: this.#drawn });
    }
  }

  #control(message) {
    if (this.#socket?.readyState === 1) {
      this.#socket.send(JSON.stringify(message));
    }
  }

  #lost(code) {
    if (this.#attached && this.world.now() - this.#connectedAt >= GOOD_AFTER) {
      this.#failures = 0;
    }
    this.#drop();
    this.#judge(ofClose(code, this.#exit));
  }

  #judge(verdict) {
    switch (verdict.kind) {
      case "again":
        return this.#wait(verdict);
      case "sign-in":
        return this.world.tell({ name: "signed-out", why: verdict.why });
      default:
        if (verdict.next === "new") {
          this.world.keep(null);
        }
        return this.world.tell({ name: "closed", why: verdict.why, next: verdict.next });
    }
  }

  /** Clients reconnect a little later than requested, and not all at once. */
  #wait({ why, seconds }) {
    const pause = PAUSES[Math.min(this.#failures, PAUSES.length - 1)] * (0.5 + this.world.chance());
    this.#failures += 1;
    const at = this.world.now() + 1000 * Math.max(seconds, pause);
    const turn = ++this.#turn;
    const look = () => {
      if (turn !== this.#turn) {
        return;
      }
      const left = at - this.world.now();
      if (left <= 0) {
        this.open();
        return;
      }
      this.world.tell({ name: "waiting", seconds: Math.ceil(left / 1000), why });
      this.#timer = this.world.after(look, Math.min(left, 1000));
    };
    look();
  }

  /** A connection that says nothing for too long counts as lost: a network that swallows everything closes nothing. */
  #lookAfter() {
    const silent = this.world.now() - this.#heardAt;
    const opening = this.#socket?.readyState === 0;
    const most = this.#attached ? SILENT_AFTER : opening ? OPENS_WITHIN : ATTACHES_WITHIN;
    if (silent >= most) {
      this.#lost(1006);
      return;
    }
    if (this.#attached && silent >= ASKS_EVERY) {
      this.#control({ type: "ping" });
    }
    this.#timer = this.world.after(() => this.#lookAfter(), ASKS_EVERY / 2);
  }

  #drop() {
    this.world.cancel(this.#timer);
    this.#timer = null;
    this.#attached = false;
    const socket = this.#socket;
    this.#socket = null;
    if (socket) {
      socket.onmessage = socket.onclose = socket.onopen = null;
      socket.close();
    }
  }
}
