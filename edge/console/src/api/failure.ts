// What an answer of the API says where it is a refusal, and what a missing answer is.

/** A refusal of the API, as its envelope has it; or no answer at all. */
export class ApiFailure extends Error {
  override readonly name = "ApiFailure";
  constructor(
    /** 0: no answer arrived. */
    readonly status: number,
    readonly code: string,
    message: string,
    readonly correlationId: string | null,
    /** In seconds. */
    readonly retryAfter: number | null,
    readonly details: Readonly<Record<string, unknown>> = {},
  ) {
    super(message);
  }

  /** Whether the same request may succeed later, as it is. */
  get isTemporary(): boolean {
    return this.status === 0 || this.status === 429 || this.status === 502 || this.status === 503 || this.status === 504;
  }
}

/** No answer to a request of this method; in these seconds, where it was given up. */
export function noAnswer(method: string, seconds: number | null = null): ApiFailure {
  const why = !navigator.onLine ? "This device is offline." : seconds === null ? "No answer arrived." : `No answer arrived within ${seconds} s.`;
  const next = method === "GET" ? "Try again." : "What you sent may have arrived. Send it again from here: that has no second effect.";
  return new ApiFailure(0, "no_answer", `${why} ${next}`, null, null);
}

/** The failure in an answer that is none of 2xx. */
export async function failureOf(response: Response): Promise<ApiFailure> {
  // By the service's own clock, where it says it: this device's may differ.
  const date = Date.parse(response.headers.get("Date") ?? "");
  const retryAfter = secondsOf(response.headers.get("Retry-After"), Number.isNaN(date) ? Date.now() : date);
  const text = await response.text().catch(() => "");
  let body: unknown;
  try {
    body = JSON.parse(text);
  } catch {
    body = null;
  }
  if (isEnvelope(body)) {
    return new ApiFailure(response.status, body.code, withoutPosition(body), body.correlation_id, retryAfter, body.details ?? {});
  }
  // A proxy's own answer.
  return new ApiFailure(response.status, "unreadable", `The answer (${response.status}) is not one of the API's. Try again.`, null, retryAfter);
}

interface Envelope {
  code: string;
  message: string;
  correlation_id: string | null;
  details?: Record<string, unknown>;
}

function isEnvelope(body: unknown): body is Envelope {
  return typeof body === "object" && body !== null && "code" in body && "message" in body && typeof body.message === "string";
}

/** The message without the place in the request's JSON, which its user has not written and does not see. */
function withoutPosition({ message, details }: Envelope): string {
  const { line, column } = details ?? {};
  if (typeof line !== "number" || typeof column !== "number") return message;
  return message.replace(` (line ${line}, column ${column})`, "").replace(` at line ${line}, column ${column}`, "");
}

/** `Retry-After` in seconds, at most ten minutes (RFC 9110, 10.2.3: seconds, or a date). */
export function secondsOf(header: string | null, now = Date.now()): number | null {
  const text = header?.trim() ?? "";
  // A browser reads "-5" and "5.3" as dates, too.
  if (!/^\d+$|^[A-Za-z]{3,9},? /.test(text)) return null;
  // The oldest form of a date names no zone, and means GMT.
  const instant = Date.parse(text.endsWith("GMT") ? text : `${text} GMT`);
  const seconds = /^\d/.test(text) ? Number(text) : Math.ceil((instant - now) / 1000);
  return Number.isNaN(seconds) ? null : Math.min(Math.max(seconds, 0), 600);
}
