// The one request of this page: a token that opens a terminal.

import { ofRefusal } from "./words.js";

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
