// How often and for how long the console asks.
import { MutationCache, QueryCache, QueryClient } from "@tanstack/react-query";
import { isAttended } from "../live/attention.ts";
import { eventStream } from "../live/browser.ts";
import { ApiFailure } from "./failure.ts";

/** How often a view without an event stream is read again while it is on screen. */
export const POLL_MS = 10_000;
/** The same, of something that changes within seconds. */
export const POLL_SOON_MS = 3_000;

/** How often a view is read again although the stream would report its changes. */
export const SAFETY_MS = 300_000;

/** The interval of a query whose changes the stream reports: it is short only while there is no stream. */
export function pollEvery(milliseconds: number): () => number {
  return () => (eventStream.current() === "live" ? SAFETY_MS : milliseconds);
}

/** The interval of a query whose changes no message reports: it is short only while the tab has input, or there is no stream. */
export function pollUnreported(milliseconds: number): () => number {
  return () => (isAttended() ? milliseconds : pollEvery(milliseconds)());
}

/** How often members are read again while the tab has input. */
const MEMBERS_MS = 30_000;

/** The interval of a query about entities and members. Messages report the entities alone: a member that falls silent or lags is no change of one, nor is a
 * deadline that passes. */
export function pollOfMembers(): number {
  return Math.min(pollEvery(POLL_MS)(), pollUnreported(MEMBERS_MS)());
}

/** How long what was read needs no other read because a page is opened. */
const FRESH_MS = 2_000;

/** The same of a query whose changes the stream reports: with it, what has changed is marked as old. */
export function freshFor(): number {
  return eventStream.current() === "live" ? SAFETY_MS : FRESH_MS;
}

const TRIES = 3;

export function retries(tries: number, error: Error): boolean {
  return tries < TRIES && error instanceof ApiFailure && error.isTemporary;
}

/** What `Retry-After` says, with some jitter on top; otherwise 1, 2, 4 s. */
export function retryDelay(tries: number, error: Error): number {
  const asked = error instanceof ApiFailure ? error.retryAfter : null;
  return asked === null ? 1000 * 2 ** tries : asked * 1000 + Math.random() * 500;
}

export function newQueryClient(): QueryClient {
  // A role was taken from the caller: the console offers nothing that it gave.
  const refused = (error: Error) => {
    if (error instanceof ApiFailure && error.code === "forbidden") void client.invalidateQueries({ queryKey: ["me"] });
  };
  const client = new QueryClient({
    queryCache: new QueryCache({ onError: (error, query) => query.queryKey[0] !== "me" && refused(error) }),
    mutationCache: new MutationCache({ onError: refused }),
    defaultOptions: {
      queries: { staleTime: FRESH_MS, retry: retries, retryDelay, refetchOnWindowFocus: true },
      // Never by itself: the person decides, and the key of the form makes a repetition harmless.
      mutations: { retry: false, networkMode: "always" },
    },
  });
  return client;
}
