// What these pages ask of the service: a token that opens a terminal, and a recording.

import { ofRefusal } from "./messages.js";

/** Where a tab keeps its user's access token. */
export const BEARER = "gpuaas.bearer";

/**
 * @param {string} allocation
 * @param {() => string | null} bearer
 * @param {typeof fetch} ask
 * @returns {(session: string | null) => Promise<{token: string, session_id: string, websocket_url: string}>}  rejects with a Verdict
 */
export function minting(allocation, bearer, ask = fetch) {
  return async (session) => {
    const token = bearer();
    if (token === null) {
      throw { kind: "sign-in", why: "", next: null };
    }
    const path = `/api/v1/allocations/${allocation}/terminal-tokens`;
    let answer;
    try {
      answer = await ask(path, {
        method: "POST",
        headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
        body: JSON.stringify(session === null ? {} : { session_id: session }),
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
    } catch {
      throw ofRefusal(0, {}, 0, session !== null);
    }
    const body = await answer.json().catch(() => ({}));
    if (answer.status !== 201) {
      throw ofRefusal(answer.status, body, Number(answer.headers.get("retry-after")) || 0, session !== null);
    }
    return body;
  };
}

/**
 * A recording, or a part of what there is of it.
 * @param {string} recording
 * @param {() => string | null} bearer
 * @param {typeof fetch} ask
 * @returns {(part: string) => Promise<Response>}  rejects with a Verdict
 */
export function reading(recording, bearer, ask = fetch) {
  return async (part) => {
    const token = bearer();
    if (token === null) {
      throw { kind: "sign-in", why: "", next: null };
    }
    let answer;
    try {
      answer = await ask(`/api/v1/recordings/${recording}${part}`, {
        headers: { authorization: `Bearer ${token}` },
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
    } catch {
      throw ofRefusal(0, {}, 0, false);
    }
    if (answer.status === 404) {
      throw { kind: "closed", why: "There is no such recording, or not for you.", next: null };
    }
    if (answer.status !== 200) {
      throw ofRefusal(answer.status, await answer.json().catch(() => ({})), 0, false);
    }
    return answer;
  };
}
