// Keys that open pages: `g` and the letter of the page, `?` for the list of them, Ctrl+K for the palette.
import { useEffect, useRef } from "react";
import type { Place } from "./navigation.ts";

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
      const { places, open, openList, openPalette } = latest.current;
      if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        openPalette();
        return;
      }
      // A dialog has the keyboard while it is open.
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || document.querySelector('[role="dialog"]')) return;
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
