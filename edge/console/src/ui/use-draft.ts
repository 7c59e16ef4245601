// What was typed into a form survives a reload of the tab, until it is sent or discarded.
import { useCallback, useState } from "react";
import { forgetTab, readStored, removeStored, store } from "./browser-storage.ts";

const PREFIX = "gpuaas-draft:";
/** What a form with a draft began with. */
const BEGAN_PREFIX = "gpuaas-draft-began:";
const KEY_PREFIX = "gpuaas-key:";
const OWNER = "gpuaas-drafts-of";

export type Values = Readonly<Record<string, string>>;

/** To be called once it is known who is logged in: what another user has typed in this tab is not shown to this one, nor sent as theirs. */
export function openDrafts(user: string): void {
  const owner = readStored("session", OWNER);
  // A tab of an earlier release has stored none.
  if (owner !== null && owner !== user) forgetTab();
  store("session", OWNER, user);
}

function storedValues(key: string): Values {
  try {
    const found: unknown = JSON.parse(readStored("session", key) ?? "{}");
    if (typeof found !== "object" || found === null) return {};
    return Object.fromEntries(Object.entries(found).filter((entry): entry is [string, string] => typeof entry[1] === "string"));
  } catch {
    return {};
  }
}

interface Draft {
  values: Values;
  /** The initial values that the form is based on: those of its first opening, or those that were seen since. A draft outlives its dialog, and what it is about may change
   * meanwhile. */
  began: Values;
}

function storeDraft(name: string, draft: Draft): Draft {
  store("session", PREFIX + name, JSON.stringify(draft.values));
  store("session", BEGAN_PREFIX + name, JSON.stringify(draft.began));
  return draft;
}

/** The values of the form of this name: typed earlier, or as they begin. The key makes repetitions of its request one. */
export function useDraft(name: string, initial: Values) {
  const [draft, setDraft] = useState<Draft>(() => ({ values: { ...initial, ...storedValues(PREFIX + name) }, began: { ...initial, ...storedValues(BEGAN_PREFIX + name) } }));
  const set = useCallback((field: string, value: string) => setDraft((before) => storeDraft(name, { ...before, values: { ...before.values, [field]: value } })), [name]);
  /** From here on the form is based on these initial values. */
  const rebase = useCallback((began: Values) => setDraft((before) => storeDraft(name, { ...before, began })), [name]);
  const discard = useCallback(() => {
    removeStored("session", PREFIX + name);
    removeStored("session", BEGAN_PREFIX + name);
    forgetKey(name);
  }, [name]);
  return { ...draft, set, rebase, discard };
}

/** The key of a request of this form whose outcome is unknown: the tab was reloaded before its answer. */
export function unansweredKey(name: string): string | null {
  return readStored("session", KEY_PREFIX + name);
}

export function storeKey(name: string, key: string): void {
  store("session", KEY_PREFIX + name, key);
}

export function forgetKey(name: string): void {
  removeStored("session", KEY_PREFIX + name);
}

/** The whole number that was typed; null where the field was left open. */
export function whole(typed: string | undefined): number | null {
  return typed === undefined || typed.trim() === "" ? null : Number(typed);
}
