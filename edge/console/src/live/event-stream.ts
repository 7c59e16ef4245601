// One stream of notifications per browser: the tab that holds a lock has the connection, and passes its messages on to the other tabs.
import type { Schemas } from "../api/client.ts";

/** A notification of the API. */
export type StreamMessage = Pick<Schemas["Notification"], "type"> & { id: string; time: string; data: Partial<Schemas["NotificationData"]> };

/** `live`: changes arrive. `connecting`: they will in a moment. `off`: there is no connection, so that views are read again from time to time. */
export type StreamStatus = "connecting" | "live" | "off";

/** Why messages may be missing: views are read again. */
export type StreamEvent =
  | { kind: "message"; message: StreamMessage }
  /** Messages before it may be missing. */
  | { kind: "reset" }
  /** Something was sent by another tab: these queries are read again. */
  | { kind: "sent"; names: readonly string[] };

/** What tabs send to each other. */
type TabMessage = StreamEvent | { kind: "status"; status: StreamStatus } | { kind: "hello" };

export interface Connection {
  send: (text: string) => void;
  close: () => void;
}

/** What the stream needs of the browser. */
export interface StreamHost {
  /** Opens a connection, and returns how a text is sent on it, and how it is given up. */
  connect: (received: (data: unknown) => void, closed: (code: number) => void) => Connection;
  /** Joins the channel of all tabs, and returns how a message is sent to the others. */
  joinTabs: (received: (data: unknown) => void) => (message: unknown) => void;
  /** Runs `lead` in one tab of the browser at a time. */
  elect: (lead: () => Promise<void>) => void;
  /** Finds out whether the session has ended, and waits for the next login where it has. */
  checkSession: () => Promise<void>;
}

const PING = '{"type":"ping"}';
const PING_MS = 30_000;
/** A tab whose leader is silent for so long counts as without a stream. Timers of hidden tabs run once a minute. */
export const SILENCE_MS = 150_000;
const LONGEST_PAUSE_MS = 30_000;
/** No frame ended the connection (RFC 6455, 7.4.1). */
const LOST = 1006;
const REFUSED = new Set([4401, 4403]);
const TOO_MANY = 4429;
/** The access token has ended, or this tab was too slow: ends of a connection that works. */
const ORDINARY = new Set([4408, 4413]);

export class EventStream {
  private status: StreamStatus = "connecting";
  private readonly statusListeners = new Set<() => void>();
  private readonly eventListeners = new Set<(event: StreamEvent) => void>();
  private isLeader = false;
  private silence: ReturnType<typeof setTimeout> | undefined;
  private failures = 0;
  private toTabs: (message: TabMessage) => void = () => {};

  constructor(private readonly host: StreamHost) {}

  /** Joins the tabs of this browser. */
  start(): void {
    this.toTabs = this.host.joinTabs((message) => this.fromTab(message as TabMessage));
    this.watchSilence();
    this.toTabs({ kind: "hello" });
    this.host.elect(() => this.lead());
  }

  readonly current = (): StreamStatus => this.status;
  readonly subscribe = (listener: () => void): (() => void) => {
    this.statusListeners.add(listener);
    return () => this.statusListeners.delete(listener);
  };

  on(listener: (event: StreamEvent) => void): () => void {
    this.eventListeners.add(listener);
    return () => this.eventListeners.delete(listener);
  }

  /** This tab has changed something: the other tabs read these queries again. */
  sent(names: readonly string[]): void {
    this.toTabs({ kind: "sent", names });
  }

  private fromTab(message: TabMessage): void {
    switch (message.kind) {
      case "hello":
        if (this.isLeader) this.toTabs({ kind: "status", status: this.status });
        return;
      case "status":
        this.watchSilence();
        if (!this.isLeader) this.change(message.status);
        return;
      case "sent":
      case "message":
      case "reset":
        this.deliver(message);
    }
  }

  /** Delivers to this tab and to all others. */
  private publish(event: StreamEvent): void {
    this.toTabs(event);
    this.deliver(event);
  }

  private deliver(event: StreamEvent): void {
    this.eventListeners.forEach((listener) => listener(event));
  }

  private report(status: StreamStatus): void {
    this.toTabs({ kind: "status", status });
    this.change(status);
  }

  private change(status: StreamStatus): void {
    if (status === this.status) return;
    this.status = status;
    this.statusListeners.forEach((listener) => listener());
  }

  private watchSilence(): void {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => !this.isLeader && this.change("off"), SILENCE_MS);
  }

  /** Keeps a connection while this tab is open. */
  private async lead(): Promise<void> {
    this.isLeader = true;
    for (;;) {
      const code = await this.connection();
      this.report(ORDINARY.has(code) && this.failures === 0 ? "connecting" : "off");
      if (REFUSED.has(code)) {
        await this.host.checkSession();
      }
      await pause(this.pauseAfter(code));
    }
  }

  /** After every code, also where the access token has ended or this tab was too slow: a server that closes each connection at once is not asked all the time. */
  private pauseAfter(code: number): number {
    const longest = code === TOO_MANY ? LONGEST_PAUSE_MS : Math.min(1000 * 2 ** this.failures++, LONGEST_PAUSE_MS);
    // Browsers that lost one replica do not come back in one moment.
    return longest * (0.5 + Math.random() / 2);
  }

  /** One connection until its end, with the code of its end. One that leaves a ping without an answer until the next is due has been lost: a browser
   * that has changed its network notices that only after minutes. */
  private connection(): Promise<number> {
    return new Promise((ended) => {
      let isAnswered = true;
      const end = (code: number) => {
        clearInterval(pings);
        ended(code);
      };
      const connection = this.host.connect((data) => {
        isAnswered = true;
        this.received(data);
      }, end);
      const pings = setInterval(() => {
        if (!isAnswered) {
          end(LOST);
          connection.close();
          return;
        }
        isAnswered = false;
        connection.send(PING);
      }, PING_MS);
    });
  }

  private received(data: unknown): void {
    const message = parsed(data);
    if (message === null) return;
    if (message.type === "notifications.ready") {
      this.failures = 0;
      this.report("live");
      this.publish({ kind: "reset" });
    } else if (message.type === "notifications.pong") {
      // The other tabs see by it that there is a connection.
      this.report("live");
    } else {
      this.publish({ kind: "message", message });
    }
  }
}

function parsed(data: unknown): StreamMessage | null {
  if (typeof data !== "string") return null;
  try {
    const message: unknown = JSON.parse(data);
    const isOne = typeof message === "object" && message !== null && "type" in message && "data" in message;
    return isOne ? (message as StreamMessage) : null;
  } catch {
    return null;
  }
}

function pause(milliseconds: number): Promise<void> {
  return new Promise((over) => setTimeout(over, milliseconds));
}
