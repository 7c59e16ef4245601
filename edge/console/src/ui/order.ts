// The order of a list that is in the tab as a whole, in the address: `since`, and `-since` for the reverse.

export type SortValue = string | number | bigint | null | undefined;

export interface Order {
  by: string;
  isDescending: boolean;
}

export function orderOf(text: string | undefined): Order | null {
  if (!text) return null;
  return text.startsWith("-") ? { by: text.slice(1), isDescending: true } : { by: text, isDescending: false };
}

/** What a press of the head of `by` makes of the order: ascending, then descending, then the list's own. */
export function nextOrder(text: string | undefined, by: string): string | undefined {
  if (text === by) return `-${by}`;
  return text === `-${by}` ? undefined : by;
}

const TEXTS = new Intl.Collator(undefined, { numeric: true });

function compare(a: NonNullable<SortValue>, b: NonNullable<SortValue>): number {
  if (typeof a === "string" || typeof b === "string") return TEXTS.compare(String(a), String(b));
  return a < b ? -1 : a > b ? 1 : 0;
}

/** The rows in an order; what has no value is last in both directions, and what is equal stays as it was. */
export function sorted<T>(rows: readonly T[], valueOf: (row: T) => SortValue, isDescending: boolean): T[] {
  return [...rows].sort((left, right) => {
    const [a, b] = [valueOf(left), valueOf(right)];
    if (a == null || b == null) return Number(a == null) - Number(b == null);
    return isDescending ? compare(b, a) : compare(a, b);
  });
}
