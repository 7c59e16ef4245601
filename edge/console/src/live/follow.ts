// Follows the changes that the stream reports, and those of the balance: views are read again, announcements are remembered, and polling begins where it is down.
import type { QueryClient } from "@tanstack/react-query";
import { onReturn } from "./attention.ts";
import { followBalance } from "./balance.ts";
import { eventStream } from "./browser.ts";
import { openMessages, remember, rememberConnection, takeFromTab } from "./messages.ts";
import { Refresher } from "./refresh.ts";

let isStarted = false;

/** To be called once this user is logged in; again without effect. */
export function followChanges(queries: QueryClient, user: string): void {
  if (isStarted) return;
  isStarted = true;
  openMessages(user);
  window.addEventListener("storage", takeFromTab);
  const refresher = new Refresher(queries);
  eventStream.on(refresher.onEvent);
  followBalance(queries, (names) => refresher.changed(names));
  eventStream.on((event) => event.kind === "message" && remember(event.message));
  eventStream.subscribe(() => recomputeIntervals(queries));
  onReturn(() => returned(queries));
  const connected = () => eventStream.current() === "live" && rememberConnection();
  eventStream.subscribe(connected);
  window.addEventListener("pagehide", connected);
  eventStream.start();
}

/** The views of a tab that was idle are as old as its long intervals: those on screen are read again at once. */
function returned(queries: QueryClient): void {
  recomputeIntervals(queries);
  void queries.refetchQueries({ type: "active", stale: true }, { cancelRefetch: false });
}

/** How often a query is read follows from the stream's status and from who uses the tab, which its observers look at when they get their options. */
function recomputeIntervals(queries: QueryClient): void {
  for (const query of queries.getQueryCache().getAll()) {
    for (const observer of query.observers) observer.setOptions(observer.options);
  }
}
