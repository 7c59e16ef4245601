// The client of the API: every request of the console goes through here.
import createClient from "openapi-fetch";
import { forgetMessages } from "../live/messages.ts";
import { Session } from "../session/session.ts";
import { forgetTab } from "../ui/browser-storage.ts";
import { ApiFailure, failureOf, noAnswer } from "./failure.ts";
import { parseLossless } from "./lossless-json.ts";
import { readClock } from "./service-clock.ts";
import type { components, paths } from "../../generated/schema.d.ts";

export type Schemas = components["schemas"];

/** An answer that takes longer is given up. The API's own limits are 20 s, and 90 s for statements. */
const TIMEOUT_MS = 100_000;

async function userId(): Promise<string | null> {
  const response = await fetch("/api/v1/me").catch(() => null);
  if (!response?.ok) return null;
  const me = (await response.json()) as Schemas["Me"];
  return me.user_id;
}

export const session = new Session(userId, () => {
  // What the user before typed is not shown to this one.
  forgetTab();
  forgetMessages();
  window.location.reload();
});

/**
 * Sends a request, and again after a new login where the session has ended meanwhile. A failure is thrown.
 * The same request is sent: its `Idempotency-Key` is the same, so it has one effect.
 */
export async function send(request: Request): Promise<Response> {
  const again = request.clone();
  let response = await answerTo(request);
  if (response.status === 401 && session.current() !== "unknown") {
    await session.restored();
    response = await answerTo(again);
  }
  return read(request, response);
}

/** Sends a request that no login is waited for. A failure is thrown. */
export async function sendOnce(request: Request): Promise<Response> {
  return read(request, await answerTo(request));
}

async function read({ method }: Request, response: Response): Promise<Response> {
  if (!response.ok) throw await failureOf(response);
  if (response.status === 204) return response;
  const text = await response.text().catch((error: unknown) => {
    throw noAnswer(method, secondsOfTimeout(error));
  });
  return withJson(response, text);
}

async function answerTo(request: Request): Promise<Response> {
  const signal = AbortSignal.any([request.signal, AbortSignal.timeout(TIMEOUT_MS)]);
  try {
    const answer = await fetch(new Request(request, { signal }));
    readClock(answer);
    return answer;
  } catch (error) {
    if (request.signal.aborted) throw error;
    throw noAnswer(request.method, secondsOfTimeout(error));
  }
}

/** After how many seconds a request was given up; null where it failed otherwise. */
function secondsOfTimeout(error: unknown): number | null {
  const isTimeout = typeof error === "object" && error !== null && "name" in error && error.name === "TimeoutError";
  return isTimeout ? TIMEOUT_MS / 1000 : null;
}

/** The response, whose JSON is read without loss of digits. */
function withJson(response: Response, text: string): Response {
  let body: unknown;
  try {
    body = text === "" ? undefined : parseLossless(text);
  } catch {
    throw new ApiFailure(response.status, "unreadable", "The answer arrived in part. Try again.", null, null);
  }
  const headers = new Headers(response.headers);
  // Makes openapi-fetch call `json()`.
  headers.set("Content-Length", String(text.length));
  const parsed = new Response(null, { status: response.status, headers });
  parsed.json = () => Promise.resolve(body);
  return parsed;
}

export const api = createClient<paths>({ baseUrl: window.location.origin, fetch: send });

/** The data of an answer; `send` has thrown where there is none. */
export async function dataOf<T>(answer: Promise<{ data?: T }>): Promise<T> {
  return (await answer).data as T;
}

/** The header that makes a repetition of a request have no second effect. */
export function keyed(key: string): { header: { "Idempotency-Key": string } } {
  return { header: { "Idempotency-Key": key } };
}
