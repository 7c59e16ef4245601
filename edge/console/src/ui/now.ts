// One clock for all views: it ticks once a second while the tab is visible.
import { useSyncExternalStore } from "react";
import { serviceNow } from "../api/service-clock.ts";

const listeners = new Set<() => void>();
let now = serviceNow();
let timer: ReturnType<typeof setInterval> | null = null;

function tick(): void {
  if (document.hidden) return;
  now = serviceNow();
  listeners.forEach((listener) => listener());
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  if (timer === null) {
    now = serviceNow();
    timer = setInterval(tick, 1000);
  }
  return () => {
    listeners.delete(listener);
    if (listeners.size === 0 && timer !== null) {
      clearInterval(timer);
      timer = null;
    }
  };
}

/** The current time at the service, in milliseconds. */
export function useNow(): number {
  return useSyncExternalStore(subscribe, () => now);
}
