// What these pages ask of the service: a token that opens a terminal, and a recording.

import { ofRefusal } from "./messages.js";

/** The access token that this page was given, if any. It is in the memory of this page alone: a storage would be read by every page of this service. */
let given = null;
export const bearer = {
  /** @returns {string | null} */
  token: () => given,
  /** @param {string | null} token */
  give: (token) => {
    given = token;
  },
};

/**
 * How a request names its user: by the token that this page was given, or by the login to the web console, whose cookie no script can read.
 * @param {string | null} token
 * @returns {{headers: Record<string, string>, credentials: "omit" | "same-origin"}}
 */
export function identifying(token) {
  return token === null ? { headers: {}, credentials: "same-origin" } : { headers: { authorization: `Bearer ${token}` }, credentials: "omit" };
}

/**
 * What a refusal means, where the user may be unknown: then nothing has gone wrong, and the page asks who it is.
 * @param {string | null} token
 * @returns {import("./messages.js").Verdict}
 */
export function refusalOf(token, status, body, seconds, resumes) {
  const isUnknown = status === 401 && token === null && body.code !== "session_ended";
  return isUnknown ? { kind: "sign-in", why: "", next: null } : ofRefusal(status, body, seconds, resumes);
}

/**
 * Ends the login to the web console.
 * @returns {Promise<string | null>}  where the browser goes to log out at the identity provider, too: a path of this service
 */
export async function logOut(ask = fetch) {
  const answer = await ask("/console/logout", { method: "POST", credentials: "same-origin", cache: "no-store", redirect: "error" });
  return answer.ok ? (await answer.json()).logout_url : null;
}

/**
 * @param {string} allocation
 * @param {() => string | null} bearer
 * @param {typeof fetch} ask
 * @returns {(session: string | null) => Promise<{token: string, session_id: string, websocket_url: string}>}  rejects with a Verdict
 */
export function minting(allocation, bearer, ask = fetch) {
  return async (session) => {
    const token = bearer();
    const path = `/api/v1/allocations/${allocation}/terminal-tokens`;
    let answer;
    try {
      answer = await ask(path, {
        method: "POST",
        credentials: identifying(token).credentials,
        headers: { ...identifying(token).headers, "content-type": "application/json" },
        body: JSON.stringify(session === null ? {} : { session_id: session }),
        cache: "no-store",
        redirect: "error",
      });
    } catch {
      throw ofRefusal(0, {}, 0, session !== null);
    }
    const body = await answer.json().catch(() => ({}));
    if (answer.status !== 201) {
      throw refusalOf(token, answer.status, body, Number(answer.headers.get("retry-after")) || 0, session !== null);
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
    let answer;
    try {
      answer = await ask(`/api/v1/recordings/${recording}${part}`, {
        ...identifying(token),
        cache: "no-store",
        redirect: "error",
      });
    } catch {
      throw ofRefusal(0, {}, 0, false);
    }
    if (answer.status === 404) {
      throw { kind: "closed", why: "There is no such recording, or not for you.", next: null };
    }
    if (answer.status !== 200) {
      throw refusalOf(token, answer.status, await answer.json().catch(() => ({})), 0, false);
    }
    return answer;
  };
}
