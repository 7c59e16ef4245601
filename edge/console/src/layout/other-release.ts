// Notices that the service has the files of another release than the one that runs in this tab.
import { useSyncExternalStore } from "react";

/** How many parts of the console could not be loaded. */
let missing = 0;
const listeners = new Set<() => void>();

/** Offers a reload. Without a network every file is missing, whatever its release: then the page says that the device is offline. */
export function partIsMissing(): void {
  if (!navigator.onLine) return;
  missing += 1;
  listeners.forEach((changed) => changed());
}

/** From the start of the console on. */
export function watchForOtherRelease(): void {
  window.addEventListener("vite:preloadError", (event) => {
    // The import has no value then, and nothing reloads the page by itself: what was typed stays.
    event.preventDefault();
    partIsMissing();
  });
  // A script of a module begins once the style sheets of its document are loaded, or have failed.
  if (getComputedStyle(document.documentElement).getPropertyValue("--paper") === "") partIsMissing();
}

/** More than 0: a reload is needed. Each file that is missing raises it. */
export function useMissingParts(): number {
  return useSyncExternalStore(
    (changed) => {
      listeners.add(changed);
      return () => listeners.delete(changed);
    },
    () => missing,
  );
}
