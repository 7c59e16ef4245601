// Labels as a person types them.

/** `key=value` pairs that are separated by commas. */
export function labelsOf(text: string): [string, string][] {
  const pairs = text.split(",").map((pair) => pair.trim()).filter(Boolean);
  return pairs.map((pair) => {
    const at = pair.indexOf("=");
    return at < 0 ? [pair, ""] : [pair.slice(0, at), pair.slice(at + 1)];
  });
}

export function labelsText(labels: Readonly<Record<string, string>>): string {
  return Object.entries(labels).map(([key, value]) => `${key}=${value}`).join(", ");
}

/** What changes from the labels to those that were typed: a label that is gone is null. */
export function labelChanges(before: Readonly<Record<string, string>>, typed: string): Record<string, string | null> {
  const after = Object.fromEntries(labelsOf(typed));
  const removed = Object.keys(before).filter((key) => !(key in after)).map((key) => [key, null] as const);
  const set = Object.entries(after).filter(([key, value]) => before[key] !== value);
  return Object.fromEntries([...removed, ...set]);
}
