// The user's open sessions on the allocation: what there is, and how one is ended.

import { identifying, refusalOf } from "./api.js";
import { ofRefusal } from "./messages.js";

/**
 * @typedef {{id: string, state: "opened" | "attached" | "detached" | "closed", opened_at: string, detached_at: string | null,
 *            ends_at: string}} OpenSession
 *
 * @param {string} allocation
 * @param {() => string | null} bearer
 * @param {typeof fetch} ask
 * @returns {{list: () => Promise<OpenSession[]>, end: (id: string) => Promise<OpenSession>}}  both reject with a Verdict
 */
export function sessionsOf(allocation, bearer, ask = fetch) {
  const base = `/api/v1/allocations/${allocation}/terminal-sessions`;
  const request = async (method, path) => {
    const token = bearer();
    let answer;
    try {
      answer = await ask(path, { method, ...identifying(token), cache: "no-store", redirect: "error" });
    } catch {
      throw ofRefusal(0, {}, 0, false);
    }
    const body = await answer.json().catch(() => ({}));
    if (answer.status !== 200) {
      throw refusalOf(token, answer.status, body, Number(answer.headers.get("retry-after")) || 0, true);
    }
    return body;
  };
  return {
    list: async () => (await request("GET", `${base}?limit=200`)).items,
    end: (id) => request("DELETE", `${base}/${encodeURIComponent(id)}`),
  };
}

/**
 * A row of the list, as a person reads it.
 * @param {OpenSession} session
 * @param {string | null} current   the session that this page shows
 * @param {Date} now
 * @returns {{text: string, isCurrent: boolean}}
 */
export function ofSession(session, current, now) {
  const isCurrent = session.id === current;
  const opened = `Opened ${new Date(session.opened_at).toLocaleString()}`;
  if (isCurrent) {
    return { text: `${opened}, shown here.`, isCurrent };
  }
  if (session.state !== "detached") {
    return { text: `${opened}, open in another place.`, isCurrent };
  }
  const minutes = Math.max(0, Math.ceil((new Date(session.ends_at) - now) / 60_000));
  return { text: `${opened}, no browser is connected. It ends in ${minutes} min.`, isCurrent };
}
