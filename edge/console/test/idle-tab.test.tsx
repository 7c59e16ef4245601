// How often an idle tab reads what is on screen while the stream of notifications reports the changes.
import { beforeEach, expect, it, vi } from "vitest";
import { screen, waitFor } from "@testing-library/react";
import type { Query } from "@tanstack/react-query";
import { NAVIGATION } from "../src/layout/navigation.ts";
import { eventStream } from "../src/live/browser.ts";
import { balance } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

const A_MINUTE = 60_000;

/** What is read within a minute although nothing is done, by its page, in seconds: what no message reports. */
const READ_ALL_THE_TIME: Readonly<Record<string, Readonly<Record<string, number>>>> = {
  "/catalog": { capacity: 10, catalog: 60 },
  "/audit": { audit: 30 },
  "/operations": { cluster: 10, "fleet-load": 15, "fleet-overview": 30, tree: 30 },
  "/stuck": { tree: 30 },
  "/alerts": { alerts: 15 },
};

beforeEach(() => {
  vi.spyOn(eventStream, "current").mockReturnValue("live");
});

/** The shortest interval at which a view on screen has the query read; null where none has. */
function intervalOf(query: Query): number | null {
  const intervals = query.observers.flatMap(({ options: { refetchInterval } }) => {
    const interval = typeof refetchInterval === "function" ? refetchInterval(query) : refetchInterval;
    return typeof interval === "number" ? [interval] : [];
  });
  return intervals.length === 0 ? null : Math.min(...intervals);
}

const PLACES = NAVIGATION.flatMap(({ places }) => places.map(({ to, title }) => [title, to] as const));

it.each(PLACES)("%s reads within a minute only what no message reports", async (title, to) => {
  mock.role = NAVIGATION[0]?.places.some((place) => place.to === to) ? "user" : "admin";
  mock.allocations = [];
  mock.balance = { ...balance, running: 0, burn_minor_per_hour: 0 };
  const { queries } = openConsole(to);
  await screen.findByRole("heading", { level: 1, name: title });
  await waitFor(() => expect(queries.isFetching()).toBe(0));
  const often = queries.getQueryCache().getAll().flatMap((query) => {
    const interval = intervalOf(query);
    return interval !== null && interval <= A_MINUTE ? [[String(query.queryKey[0]), interval / 1000] as const] : [];
  });
  expect(Object.fromEntries(often)).toEqual(READ_ALL_THE_TIME[to] ?? {});
});

it("the balance is read every minute while something is paid from it", async () => {
  const { queries } = openConsole("/");
  await screen.findByRole("heading", { level: 1, name: "Overview" });
  const query = queries.getQueryCache().find({ queryKey: ["balance"] });
  await waitFor(() => expect(query && intervalOf(query)).toBe(A_MINUTE));
});
