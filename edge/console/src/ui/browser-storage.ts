// What this browser remembers. It may refuse its storage, or have no room left: then what is stored lasts as long as the page.

const AREAS = { local: () => localStorage, session: () => sessionStorage };
/** What the browser did not take. */
const instead = new Map<string, string>();

type Area = keyof typeof AREAS;

export function readStored(area: Area, key: string): string | null {
  const own = instead.get(`${area} ${key}`);
  if (own !== undefined) return own;
  try {
    return AREAS[area]().getItem(key);
  } catch {
    return null;
  }
}

export function store(area: Area, key: string, value: string): void {
  instead.delete(`${area} ${key}`);
  try {
    AREAS[area]().setItem(key, value);
  } catch {
    instead.set(`${area} ${key}`, value);
  }
}

export function removeStored(area: Area, key: string): void {
  instead.delete(`${area} ${key}`);
  try {
    AREAS[area]().removeItem(key);
  } catch {
    // Nothing is stored there.
  }
}

/** Forgets all that was stored for this tab. */
export function forgetTab(): void {
  instead.clear();
  try {
    sessionStorage.clear();
  } catch {
    // Nothing is stored there.
  }
}
