// What was typed into a form survives a reload of the tab, until it is sent or discarded.
import { useCallback, useState } from "react";
import { forgetTab, readStored, removeStored, store } from "./browser-storage.ts";

const PREFIX = "gpuaas-draft:";
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

function stored(name: string): Values {
  try {
    const found: unknown = JSON.parse(readStored("session", PREFIX + name) ?? "{}");
    if (typeof found !== "object" || found === null) return {};
    return Object.fromEntries(Object.entries(found).filter((entry): entry is [string, string] => typeof entry[1] === "string"));
  } catch {
    return {};
  }
}

/** The values of the form of this name: typed earlier, or as they begin. The key makes repetitions of its request one. */
export function useDraft(name: string, initial: Values) {
  const [values, setValues] = useState<Values>(() => ({ ...initial, ...stored(name) }));
  const set = useCallback(
    (field: string, value: string) =>
      setValues((before) => {
        const after = { ...before, [field]: value };
        store("session", PREFIX + name, JSON.stringify(after));
        return after;
      }),
    [name],
  );
  const discard = useCallback(() => {
    removeStored("session", PREFIX + name);
    forgetKey(name);
  }, [name]);
  return { values, set, discard };
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
