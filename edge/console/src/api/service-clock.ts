// The service's clock. That of a device may be off by hours; instants of the service are shown by its own.

/** Answers travel, and a `Date` header has whole seconds: a smaller difference is none. */
const TOLERANCE_MS = 10_000;

let offsetMs = 0;

/** Reads the clock out of an answer's `Date` header. */
export function readClock(answer: Response, now = Date.now()): void {
  const at = Date.parse(answer.headers.get("Date") ?? "");
  if (Number.isNaN(at)) return;
  offsetMs = Math.abs(at - now) > TOLERANCE_MS ? at - now : 0;
}

/** The current time at the service, in milliseconds. */
export function serviceNow(): number {
  return Date.now() + offsetMs;
}

/** By how much this device's clock is ahead of the service's, in milliseconds; negative where it is behind. */
export function deviceAheadMs(): number {
  return -offsetMs;
}
