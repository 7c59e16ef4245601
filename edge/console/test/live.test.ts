// The stream of notifications: shared by the tabs of a browser, and what it makes them read.
import { QueryClient, QueryObserver } from "@tanstack/react-query";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { EventStream, SILENCE_MS, type StreamEvent, type StreamHost } from "../src/live/event-stream.ts";
import { followBalance, POSTINGS } from "../src/live/balance.ts";
import { concerned, Refresher } from "../src/live/refresh.ts";

const flush = () => vi.advanceTimersByTimeAsync(0);

/** A browser with tabs: their channel, their lock, and the connections that they open. */
class FakeBrowser {
  readonly connections: { received: (data: unknown) => void; closed: (code: number) => void; sent: string[]; isGivenUp: boolean }[] = [];
  private readonly tabs = new Set<(message: unknown) => void>();
  private readonly waiting: (() => Promise<void>)[] = [];
  sessionChecks = 0;

  tab(): { stream: EventStream; events: StreamEvent[]; close: () => void; freeze: () => void } {
    let isFrozen = false;
    let received: (message: unknown) => void = () => {};
    const host: StreamHost = {
      connect: (message, closed) => {
        const sent: string[] = [];
        const connection = { received: message, closed, sent, isGivenUp: false };
        this.connections.push(connection);
        return { send: (text) => void sent.push(text), close: () => void (connection.isGivenUp = true) };
      },
      joinTabs: (listener) => {
        received = listener;
        this.tabs.add(listener);
        return (message) => this.tabs.forEach((other) => !isFrozen && other !== listener && other(structuredClone(message)));
      },
      elect: (lead) => {
        this.waiting.push(lead);
        if (this.waiting.length === 1) void lead();
      },
      checkSession: () => {
        this.sessionChecks += 1;
        return Promise.resolve();
      },
    };
    const stream = new EventStream(host);
    const events: StreamEvent[] = [];
    stream.on((event) => events.push(event));
    stream.start();
    const close = () => {
      this.tabs.delete(received);
      this.waiting.shift();
      void this.waiting[0]?.();
    };
    return { stream, events, close, freeze: () => void (isFrozen = true) };
  }

  send(type: string, data: object = {}): void {
    this.connections.at(-1)?.received(JSON.stringify({ id: crypto.randomUUID(), time: "2026-11-26T00:00:00Z", type, data }));
  }
}

let browser: FakeBrowser;
beforeEach(() => {
  vi.useFakeTimers();
  browser = new FakeBrowser();
});
afterEach(() => {
  vi.restoreAllMocks();
  vi.useRealTimers();
});

describe("the tabs of a browser", () => {
  it("share one connection, and all receive its messages", () => {
    const [first, second] = [browser.tab(), browser.tab()];
    expect(browser.connections).toHaveLength(1);
    browser.send("notifications.ready");
    browser.send("billing.balance_low", { account_id: "a" });
    for (const { stream, events } of [first, second]) {
      expect(stream.current()).toBe("live");
      expect(events.map(({ kind }) => kind)).toEqual(["reset", "message"]);
    }
  });
  it("that open later know the status from the tab that has the connection", () => {
    browser.tab();
    browser.send("notifications.ready");
    expect(browser.tab().stream.current()).toBe("live");
  });
  it("go on with another connection when the first tab closes", () => {
    const first = browser.tab();
    const second = browser.tab();
    browser.send("notifications.ready");
    first.close();
    expect(browser.connections).toHaveLength(2);
    browser.send("notifications.ready");
    expect(second.events.map(({ kind }) => kind)).toEqual(["reset", "reset"]);
  });
  it("tell each other what they have sent", () => {
    const [first, second] = [browser.tab(), browser.tab()];
    first.stream.sent(["ssh-keys"]);
    expect(second.events).toEqual([{ kind: "sent", names: ["ssh-keys"] }]);
    expect(first.events).toEqual([]);
  });
  it("count as without a stream when their leader is silent", async () => {
    const first = browser.tab();
    const second = browser.tab();
    browser.send("notifications.ready");
    for (let pings = 0; pings < 6; pings += 1) {
      await vi.advanceTimersByTimeAsync(30_000);
      browser.send("notifications.pong");
    }
    first.freeze();
    await vi.advanceTimersByTimeAsync(SILENCE_MS - 1000);
    expect(second.stream.current()).toBe("live");
    await vi.advanceTimersByTimeAsync(2000);
    expect(second.stream.current()).toBe("off");
  });
});

describe("a connection that ends", () => {
  it("is opened again within a second where its token has ended, and views are read again", async () => {
    const { stream, events } = browser.tab();
    browser.send("notifications.ready");
    browser.connections[0]?.closed(4408);
    await flush();
    expect(stream.current()).toBe("connecting");
    await vi.advanceTimersByTimeAsync(1000);
    expect(browser.connections).toHaveLength(2);
    browser.send("notifications.ready");
    expect(stream.current()).toBe("live");
    expect(events.map(({ kind }) => kind)).toEqual(["reset", "reset"]);
  });
  it("for a client that was too slow is opened again, and everything is read again", async () => {
    const { events } = browser.tab();
    browser.send("notifications.ready");
    browser.connections[0]?.closed(4413);
    await vi.advanceTimersByTimeAsync(1000);
    browser.send("notifications.ready");
    expect(events.at(-1)).toEqual({ kind: "reset" });
  });
  it.each([4408, 4413])("with the code %i is not opened again at once, and those of many browsers not in one moment", async (code) => {
    const pauses = new Set<number>();
    for (const chance of [0, 0.5, 0.999]) {
      vi.spyOn(Math, "random").mockReturnValue(chance);
      browser = new FakeBrowser();
      browser.tab();
      browser.send("notifications.ready");
      const closed = Date.now();
      browser.connections[0]?.closed(code);
      await vi.advanceTimersByTimeAsync(499);
      expect(browser.connections).toHaveLength(1);
      while (browser.connections.length === 1) await vi.advanceTimersByTimeAsync(10);
      pauses.add(Date.now() - closed);
    }
    expect(pauses.size).toBe(3);
  });
  it.each([4408, 4413])("with the code %i before it was ready is opened again more and more seldom", async (code) => {
    browser.tab();
    for (let second = 0; second < 600; second += 1) {
      if (browser.connections.length > 0) browser.connections.at(-1)?.closed(code);
      await vi.advanceTimersByTimeAsync(1000);
    }
    // 600 s: five connections of the first half minute, then one in 15 to 30 s.
    expect(browser.connections.length).toBeLessThan(50);
  });
  it("by an outage is tried again more and more seldom", async () => {
    browser.tab();
    for (let attempt = 0; attempt < 10; attempt += 1) {
      browser.connections.at(-1)?.closed(1006);
      await vi.advanceTimersByTimeAsync(30_000);
    }
    expect(browser.connections).toHaveLength(11);
    browser.connections.at(-1)?.closed(1006);
    await vi.advanceTimersByTimeAsync(14_000);
    expect(browser.connections).toHaveLength(11);
  });
  it("without an end, as that of a device which has changed its network, is given up after a ping without an answer", async () => {
    const { stream } = browser.tab();
    browser.send("notifications.ready");
    await vi.advanceTimersByTimeAsync(30_000);
    browser.send("notifications.pong");
    await vi.advanceTimersByTimeAsync(30_000);
    // Any message is an answer.
    browser.send("billing.balance_low", { account_id: "a" });
    await vi.advanceTimersByTimeAsync(30_000);
    expect([stream.current(), browser.connections.length]).toEqual(["live", 1]);
    await vi.advanceTimersByTimeAsync(29_999);
    expect(stream.current()).toBe("live");
    await vi.advanceTimersByTimeAsync(1);
    expect([stream.current(), browser.connections[0]?.isGivenUp]).toEqual(["off", true]);
    await vi.advanceTimersByTimeAsync(1000);
    browser.send("notifications.ready");
    expect([stream.current(), browser.connections.length]).toEqual(["live", 2]);
  });
  it("by a refusal asks whether the session has ended", async () => {
    browser.tab();
    browser.connections[0]?.closed(4403);
    await flush();
    expect(browser.sessionChecks).toBe(1);
  });
});

describe("a message", () => {
  it("concerns the queries that show what it is about", () => {
    const message = (type: string, data: object) => ({ id: "1", time: "", type, data });
    expect(concerned(message("billing.balance_low", {}))).toEqual(expect.arrayContaining(["balance", "estimate"]));
    expect(concerned(message("provisioning.active", {}))).toEqual(expect.arrayContaining(["allocation", "allocations"]));
    expect(concerned(message("runtime.changed", { kinds: ["rollout"] }))).toEqual(expect.arrayContaining(["tree", "rollouts"]));
    expect(concerned(message("runtime.changed", { kinds: ["rollout"] }))).not.toContain("nodes");
    expect(concerned(message("of.a.later.release", {}))).toEqual([]);
  });
});

describe("the views of postings", () => {
  const queries = new QueryClient();
  const read = (name: string, balance_micro: number, id = "a") => queries.fetchQuery({ queryKey: [name], queryFn: () => ({ id, balance_micro }), staleTime: 0 });

  it("are read again with each balance that is another one", async () => {
    const changed = vi.fn();
    const stop = followBalance(queries, changed);
    await read("balance", 5);
    await read("balance", 5);
    await read("account", 4);
    expect(changed).not.toHaveBeenCalled();
    await read("balance", 4);
    expect(changed.mock.calls).toEqual([[POSTINGS]]);
    // The token names another organization.
    await read("balance", 4, "b");
    expect(changed).toHaveBeenCalledTimes(2);
    stop();
    await read("balance", 3);
    expect(changed).toHaveBeenCalledTimes(2);
  });
});

describe("what is read again", () => {
  const reads: string[] = [];
  const queries = new QueryClient();
  let refresher: Refresher;
  /** A view of a query: read as long as it is on screen. */
  function view(key: unknown[], took = 10): () => void {
    const queryFn = async () => {
      reads.push(key.join("/"));
      await new Promise((over) => setTimeout(over, took));
      return reads.length;
    };
    return new QueryObserver(queries, { queryKey: key, queryFn, staleTime: Infinity }).subscribe(() => {});
  }
  beforeEach(() => {
    reads.length = 0;
    queries.clear();
    refresher = new Refresher(queries);
  });

  it("is what is on screen and concerned, and of one entity only that entity", async () => {
    const stops = [view(["nodes"]), view(["node", "a"]), view(["node", "b"]), view(["balance"])];
    const hidden = view(["gpu-map"]);
    await vi.advanceTimersByTimeAsync(50);
    hidden();
    reads.length = 0;
    refresher.onEvent({ kind: "message", message: { id: "1", time: "", type: "runtime.changed", data: { kinds: ["node"], entities: [{ kind: "node", id: "b" }] } } });
    await vi.advanceTimersByTimeAsync(2000);
    expect(reads.sort()).toEqual(["node/b", "nodes"]);
    expect(queries.getQueryState(["gpu-map"])?.isInvalidated).toBe(true);
    stops.forEach((stop) => stop());
  });
  it("is read again after a read that was under way when it changed", async () => {
    const stop = view(["nodes"], 300);
    await vi.advanceTimersByTimeAsync(100);
    refresher.changed(["nodes"]);
    expect(reads).toEqual(["nodes"]);
    await vi.advanceTimersByTimeAsync(3000);
    expect(reads).toEqual(["nodes", "nodes"]);
    stop();
  });
  it("is not read all the time by a hundred changes a second, and ends with the last one", async () => {
    const stop = view(["nodes"], 200);
    await vi.advanceTimersByTimeAsync(500);
    reads.length = 0;
    for (let change = 0; change < 1000; change += 1) {
      refresher.changed(["nodes"]);
      await vi.advanceTimersByTimeAsync(10);
    }
    // Ten seconds: at most one read in 0.7 s, a third of the time.
    expect(reads.length).toBeGreaterThan(5);
    expect(reads.length).toBeLessThan(16);
    reads.length = 0;
    await vi.advanceTimersByTimeAsync(3000);
    expect(reads.length).toBeGreaterThanOrEqual(1);
    expect(queries.getQueryState(["nodes"])?.isInvalidated).toBe(false);
    stop();
  });
});
