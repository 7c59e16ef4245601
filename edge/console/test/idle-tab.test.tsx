// What a tab without input asks for while the stream of notifications reports the changes: nothing within a minute.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { fireEvent, screen, waitFor } from "@testing-library/react";
import type { QueryClient } from "@tanstack/react-query";
import { SAFETY_MS } from "../src/api/query-client.ts";
import { IDLE_AFTER_MS, isAttended, onReturn } from "../src/live/attention.ts";
import { eventStream } from "../src/live/browser.ts";
import { followChanges } from "../src/live/follow.ts";
import { Refresher } from "../src/live/refresh.ts";
import { ADMIN_PAGES, USER_PAGES } from "./chromium/console-pages.ts";
import { uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

// Ages are no requests, and drawing them anew each second takes most of the time of this test.
vi.mock("../src/ui/now.ts", async () => {
  const { serviceNow } = await import("../src/api/service-clock.ts");
  const now = serviceNow();
  return { useNow: () => now };
});

const A_MINUTE = 60_000;
/** The longest interval of something that no message reports, while the tab has input. */
const LONGEST_MS = 60_000;

let asked: string[] = [];
let isHidden = false;

beforeEach(() => {
  // Time goes on by itself until a page is read.
  vi.useFakeTimers({ shouldAdvanceTime: true, toFake: ["setTimeout", "clearTimeout", "setInterval", "clearInterval", "Date", "performance"] });
  vi.spyOn(eventStream, "current").mockReturnValue("live");
  isHidden = false;
  vi.spyOn(document, "visibilityState", "get").mockImplementation(() => (isHidden ? "hidden" : "visible"));
  vi.spyOn(document, "hidden", "get").mockImplementation(() => isHidden);
  asked = [];
  mock.overrides.push(({ url }) => {
    asked.push(new URL(url).pathname);
    return null;
  });
  fireEvent.keyDown(document.body, { key: "Shift" });
});
afterEach(() => {
  vi.useRealTimers();
});

const isRead = (queries: QueryClient) => queries.isFetching() === 0 && document.querySelector("h1") !== null && document.querySelector(".loading") === null;

/** The page once it has read all that it reads by itself. */
async function opened(role: "user" | "admin", address: string): Promise<QueryClient> {
  mock.role = role;
  const { queries } = openConsole(address);
  await waitFor(() => expect(isRead(queries)).toBe(true));
  return queries;
}

async function pass(milliseconds: number): Promise<void> {
  await vi.advanceTimersByTimeAsync(milliseconds);
}

const PAGES = [...Object.values(USER_PAGES).map((address) => ["user", address] as const), ...Object.values(ADMIN_PAGES).map((address) => ["admin", address] as const)];

describe("a tab without input", () => {
  it.each(PAGES)("asks for nothing within a minute, as %s: %s", async (role, address) => {
    const queries = await opened(role, address);
    await pass(IDLE_AFTER_MS + LONGEST_MS);
    await waitFor(() => expect(isRead(queries)).toBe(true));
    asked = [];
    await pass(A_MINUTE);
    expect(asked).toEqual([]);
  });

  it("is read again every five minutes at most, whatever it shows", async () => {
    await opened("admin", "/operations");
    await pass(IDLE_AFTER_MS + LONGEST_MS);
    asked = [];
    await pass(60 * A_MINUTE);
    const paths = new Set(asked);
    expect(paths.size).toBeGreaterThan(4);
    for (const path of paths) expect(asked.filter((one) => one === path).length, path).toBeLessThanOrEqual((60 * A_MINUTE) / SAFETY_MS);
  });

  it("asks for nothing at all while it is hidden", async () => {
    await opened("admin", "/operations");
    isHidden = true;
    document.dispatchEvent(new Event("visibilitychange"));
    asked = [];
    await pass(3 * SAFETY_MS);
    expect(asked).toEqual([]);
  });
});

describe("a tab with input", () => {
  it.each([
    ["user", "/catalog", "/api/v1/capacity", 10],
    ["user", "/", "/api/v1/billing/balance", 60],
    ["admin", "/audit", "/api/v1/admin/audit-log", 30],
    ["admin", "/alerts", "/api/v1/admin/alerts", 15],
    ["admin", "/operations", "/api/v1/admin/runtime/cluster", 10],
    ["admin", "/stuck", "/api/v1/admin/runtime/tree", 30],
    ["admin", "/tree", "/api/v1/admin/runtime/tree", 30],
    ["admin", `/entities/allocation/${uuid(103)}`, `/api/v1/admin/runtime/entities/allocation/${uuid(103)}`, 30],
    ["admin", "/accounts", "/api/v1/admin/billing/accounts", 30],
    ["admin", `/accounts/${uuid(1)}`, `/api/v1/admin/billing/accounts/${uuid(1)}`, 10],
    ["admin", `/accounts/${uuid(1)}`, `/api/v1/admin/billing/accounts/${uuid(1)}/ledger`, 30],
    ["admin", "/payment-events", "/api/v1/admin/billing/processor-events", 10],
    ["admin", "/skus", "/api/v1/admin/skus", 30],
  ] as const)("is shown what no message reports every few seconds: %s at %s, %s", async (role, address, path, seconds) => {
    await opened(role, address);
    asked = [];
    await pass(seconds * 1000 + 500);
    expect(asked).toContain(path);
  });

  it("is read again at once after it was idle", async () => {
    vi.spyOn(eventStream, "start").mockImplementation(() => {});
    const queries = await opened("user", "/catalog");
    followChanges(queries, "ann");
    await pass(IDLE_AFTER_MS + LONGEST_MS);
    await waitFor(() => expect(isRead(queries)).toBe(true));
    asked = [];
    const returnedAt = performance.now();
    fireEvent.keyDown(document.body, { key: "Shift" });
    await waitFor(() => expect(asked).toContain("/api/v1/capacity"));
    // Sooner than by its interval.
    expect(performance.now() - returnedAt).toBeLessThan(8_000);
  });

  it("is one with a key, a press, a scroll or a movement within two minutes", async () => {
    const returned = vi.fn();
    const stop = onReturn(returned);
    for (const input of [
      () => fireEvent.keyDown(document.body, { key: "Shift" }),
      () => fireEvent.pointerDown(document.body),
      () => fireEvent.wheel(document.body),
      () => window.dispatchEvent(Object.assign(new Event("pointermove"), { movementX: 1, movementY: 0 })),
    ]) {
      await pass(IDLE_AFTER_MS);
      expect(isAttended()).toBe(false);
      // The page moved below the pointer.
      window.dispatchEvent(Object.assign(new Event("pointermove"), { movementX: 0, movementY: 0 }));
      expect(isAttended()).toBe(false);
      returned.mockClear();
      input();
      input();
      expect(isAttended()).toBe(true);
      expect(returned).toHaveBeenCalledTimes(1);
    }
    stop();
  });
});

describe("the audit log and the members", () => {
  it("are read again after changes of entities, and not with each of a hundred", async () => {
    const queries = await opened("admin", "/audit");
    const refresher = new Refresher(queries);
    asked = [];
    for (let change = 0; change < 100; change += 1) {
      refresher.onEvent({ kind: "message", message: { id: String(change), time: "", type: "runtime.changed", data: { kinds: ["node"] } } });
      await pass(100);
    }
    await pass(A_MINUTE / 3);
    expect(asked.filter((path) => path.endsWith("/audit-log")).length).toBeLessThanOrEqual(3);
    expect(asked.filter((path) => path.endsWith("/audit-log")).length).toBeGreaterThanOrEqual(2);
    expect(screen.getByRole("heading", { level: 1, name: "Audit log" })).toBeTruthy();
  });
});
