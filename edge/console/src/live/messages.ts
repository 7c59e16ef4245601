// The notifications that this browser has received, the newest first. The service stores none for a client, so they are stored here, for their user.
import { useSyncExternalStore } from "react";
import { serviceNow } from "../api/service-clock.ts";
import type { StreamMessage } from "./event-stream.ts";

const KEY = "gpuaas-notifications";
const MOST = 100;
const MOST_RENTED = 200;
/** How long an announcement is a banner. */
const ANNOUNCED_MS = 24 * 3_600_000;

interface Stored {
  user: string;
  messages: readonly StreamMessage[];
  /** Ids of announcements. */
  dismissed: readonly string[];
  /** When this browser last had a connection, as far as it could store it. */
  connected_at: string | null;
  /** What the user rented then. */
  rented: readonly string[];
}

const NOTHING: Stored = { user: "", messages: [], dismissed: [], connected_at: null, rented: [] };

let stored = NOTHING;
/** As the tab found it: messages after that time may have been missed. */
let atStart = NOTHING;
const listeners = new Set<() => void>();

/** Takes up what was stored for this user; that of another user is forgotten. */
export function openMessages(user: string): void {
  const found = load();
  atStart = found?.user === user ? found : { ...NOTHING, user };
  change(atStart);
}

/** After a logout, or where another user has logged in. */
export function forgetMessages(): void {
  stored = atStart = NOTHING;
  listeners.forEach((listener) => listener());
  attempt(() => localStorage.removeItem(KEY));
}

export function remember(message: StreamMessage): void {
  // Changes of entities are many, and are shown by the entities themselves. Repetitions have the same id.
  if (message.type === "runtime.changed" || stored.messages.some(({ id }) => id === message.id)) return;
  change({ ...stored, messages: [message, ...stored.messages].slice(0, MOST) });
}

/** What another tab has dismissed is dismissed in this one: the next message would be stored without it. */
export function takeFromTab({ key }: { key: string | null }): void {
  if (key !== KEY || stored.user === "") return;
  const found = load();
  if (found?.user !== stored.user) return;
  const others = found.dismissed.filter((id) => !stored.dismissed.includes(id));
  if (others.length === 0) return;
  stored = { ...stored, dismissed: [...others, ...stored.dismissed].slice(0, MOST) };
  listeners.forEach((listener) => listener());
}

export function dismiss(id: string): void {
  change({ ...stored, dismissed: [id, ...stored.dismissed].slice(0, MOST) });
}

/** This browser has a connection. */
export function rememberConnection(): void {
  change({ ...stored, connected_at: new Date(serviceNow()).toISOString() });
}

/** Every poll has them: they are stored where they are others. */
export function rememberRented(ids: readonly string[]): void {
  const rented = ids.slice(0, MOST_RENTED);
  if (rented.join() !== stored.rented.join()) change({ ...stored, rented });
}

/** The last connection before this tab was opened, and what the user rented then; null where there was none. */
export function connectionBefore(): { at: string; rented: readonly string[] } | null {
  return atStart.connected_at === null ? null : { at: atStart.connected_at, rented: atStart.rented };
}

export function useMessages(): readonly StreamMessage[] {
  return useSyncExternalStore(subscribe, () => stored.messages);
}

/** The announcements of the last day that were not dismissed. */
export function useAnnouncements(): readonly StreamMessage[] {
  const { messages, dismissed } = useSyncExternalStore(subscribe, () => stored);
  const isNew = (message: StreamMessage) => serviceNow() - Date.parse(message.time) < ANNOUNCED_MS && !dismissed.includes(message.id);
  return messages.filter((message) => message.type === "notification.announced" && isNew(message));
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function change(next: Stored): void {
  stored = next;
  listeners.forEach((listener) => listener());
  // Before the login it is not known whose they would be.
  if (stored.user !== "") attempt(() => localStorage.setItem(KEY, JSON.stringify(stored)));
}

function load(): Stored | null {
  const found = attempt(() => JSON.parse(localStorage.getItem(KEY) ?? "null") as Partial<Stored> | null);
  const isWhole = typeof found?.user === "string" && [found.messages, found.dismissed, found.rented].every(Array.isArray);
  return isWhole ? { ...NOTHING, ...found } : null;
}

/** A browser may refuse its storage, which then lasts as long as the tab; what is in it may be of another release. */
function attempt<T>(run: () => T): T | undefined {
  try {
    return run();
  } catch {
    return undefined;
  }
}
