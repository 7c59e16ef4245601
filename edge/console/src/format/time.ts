// Instants and durations as text: local time with UTC beside it.

const LOCAL = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const UTC = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", timeZone: "UTC" });
const RELATIVE = new Intl.RelativeTimeFormat(undefined, { numeric: "auto" });

const STEPS: [limit: number, seconds: number, unit: Intl.RelativeTimeFormatUnit][] = [
  [60, 1, "second"],
  [3600, 60, "minute"],
  [86_400, 3600, "hour"],
  [86_400 * 60, 86_400, "day"],
  [86_400 * 730, 86_400 * 30, "month"],
  [Infinity, 86_400 * 365, "year"],
];

export function localTime(at: string): string {
  return LOCAL.format(new Date(at));
}

export function utcTime(at: string): string {
  return `${UTC.format(new Date(at))} UTC`;
}

/** `in 5 minutes`, `2 days ago`. */
export function relativeTime(at: string, now: number): string {
  const seconds = (Date.parse(at) - now) / 1000;
  const [, size, unit] = STEPS.find(([limit]) => Math.abs(seconds) < limit) ?? [0, 1, "second"];
  return RELATIVE.format(Math.round(seconds / size), unit);
}

/** `3 d 4 h`, `5 min`: two units at most. */
export function duration(seconds: number): string {
  const units: [number, string][] = [
    [86_400, "d"],
    [3600, "h"],
    [60, "min"],
    [1, "s"],
  ];
  const at = units.findIndex(([size]) => seconds >= size);
  if (at < 0) return "0 s";
  const parts: string[] = [];
  let left = Math.floor(seconds);
  for (const [size, name] of units.slice(at, at + 2)) {
    const count = Math.floor(left / size);
    left -= count * size;
    if (count > 0) parts.push(`${new Intl.NumberFormat().format(count)} ${name}`);
  }
  return parts.join(" ");
}
