// Keys that open pages: `g` and the letter of the page, `?` for the list of them, Ctrl+K for the palette. Those of single characters can be switched off
// (WCAG 2.1.4): programs that are spoken to press them by words.
import { useEffect, useRef, useSyncExternalStore } from "react";
import { readStored, store } from "../ui/browser-storage.ts";
import type { Place } from "./navigation.ts";

const STORED = "gpuaas-single-keys";
const OFF = "off";
const listeners = new Set<() => void>();

function subscribe(changed: () => void): () => void {
  listeners.add(changed);
  // Another tab of the browser has switched them.
  window.addEventListener("storage", changed);
  return () => {
    listeners.delete(changed);
    window.removeEventListener("storage", changed);
  };
}

const areOn = () => readStored("local", STORED) !== OFF;

/** Whether keys of single characters open pages, as this browser remembers it; and how it is switched. */
export function useSingleKeys(): [boolean, (on: boolean) => void] {
  const on = useSyncExternalStore(subscribe, areOn);
  const set = (wanted: boolean) => {
    store("local", STORED, wanted ? "on" : OFF);
    listeners.forEach((changed) => changed());
  };
  return [on, set];
}

/** How long after `g` its letter may come. */
const SEQUENCE_MS = 1500;

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

interface ShortcutActions {
  places: readonly Place[];
  open: (to: string) => void;
  openList: () => void;
  openPalette: () => void;
}

export function useShortcuts(actions: ShortcutActions): void {
  const latest = useRef(actions);
  latest.current = actions;
  useEffect(() => {
    let startedAt = -Infinity;
    const pressed = (event: KeyboardEvent) => {
      // A browser that fills a field in reports a key without a name.
      if (!event.key) return;
      const { places, open, openList, openPalette } = latest.current;
      if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        openPalette();
        return;
      }
      // A dialog has the keyboard while it is open.
      if (event.ctrlKey || event.metaKey || event.altKey || !areOn() || isTyping(event.target) || document.querySelector('[role="dialog"]')) return;
      if (event.key === "?") openList();
      else if (event.key === "g") startedAt = event.timeStamp;
      else if (event.timeStamp - startedAt < SEQUENCE_MS) {
        startedAt = -Infinity;
        const place = places.find(({ key }) => key === event.key);
        if (place) open(place.to);
      }
    };
    document.addEventListener("keydown", pressed);
    return () => document.removeEventListener("keydown", pressed);
  }, []);
}
