// What ended a connection, and what was refused, in words; and what can be done next. What is done by itself is `again`.

/**
 * @typedef {object} Verdict
 * @property {"again" | "closed" | "sign-in"} kind
 * @property {string} why         for the person
 * @property {"new" | "take" | "retry" | null} next   what a button offers; of "closed"
 * @property {number} [seconds]   not before; of "again"
 */

const again = (why, seconds = 0) => ({ kind: "again", why, next: null, seconds });
const closed = (why, next = null) => ({ kind: "closed", why, next });

/**
 * What the end of a WebSocket means (the book, user/terminals.md).
 * @param {number} code
 * @param {{code: number | null, signal: number | null} | null} exit  how the program ended, where that was reported
 * @returns {Verdict}
 */
export function ofClose(code, exit) {
  switch (code) {
    case 1000:
      return closed(howItEnded(exit), "new");
    case 1008:
    case 1009:
      return closed("The service did not understand this page. Reload it.", "retry");
    case 1011:
      return closed("The node could not run the session. Open a new one; if that fails too, ask your operator.", "new");
    case 1012:
      return again("The service restarts.");
    case 1013:
      return again("The node cannot be reached.", 5);
    case 4401:
      return again("The connection came too late.");
    case 4403:
      return closed("The allocation was released, your login has ended, or an administrator closed the session.", "retry");
    case 4408:
      return closed("The session has reached its longest lifetime.", "new");
    case 4409:
      return closed("The session is open in another place now.", "take");
    default:
      return again("The connection is lost.");
  }
}

function howItEnded(exit) {
  if (exit && exit.signal !== null) {
    return `The program was ended by signal ${exit.signal}.`;
  }
  return exit && exit.code !== null ? `The program ended with ${exit.code}.` : "The program ended.";
}

/**
 * What a refused terminal token means.
 * @param {number} status   0: there was no answer
 * @param {{message?: string, correlation_id?: string, details?: object}} body   the error envelope, or nothing
 * @param {number} seconds   what Retry-After says
 * @param {boolean} resumes   whether a session was to be gone on with
 * @returns {Verdict}
 */
export function ofRefusal(status, body, seconds, resumes) {
  const said = typeof body.message === "string" ? body.message : `The service answers ${status}.`;
  const why = body.correlation_id ? `${said} (${body.correlation_id})` : said;
  if (status === 0) {
    return again("The service cannot be reached.");
  }
  if (status === 401 && body.code === "session_ended") {
    return { kind: "sign-in", why: "Your login has ended.", next: null };
  }
  if (status === 401) {
    return { kind: "sign-in", why: "The access token does not hold, or not any more.", next: null };
  }
  if (status === 429 || status >= 500) {
    return again(said, seconds);
  }
  if (resumes && (status === 404 || status === 409)) {
    return closed("The session is over.", "new");
  }
  if (status === 404) {
    return closed("You have no such allocation. Look at the address, and at who you are logged in as.", "retry");
  }
  return closed(why, "retry");
}

/**
 * Whether a terminal's output is recorded, and who records it.
 * @param {string} mode  "off", "best-effort" or "strict"
 * @returns {{short: string, long: string}}
 */
export function ofRecording(mode) {
  if (mode === "off") {
    return { short: "Not recorded", long: "The service does not record this terminal (policy terminal.recording_enabled)." };
  }
  const strict = mode === "strict" ? " Nothing is shown that is not recorded." : "";
  return {
    short: "Recorded by the service",
    long:
      `What this terminal shows is recorded by the service (policy terminal.recording_enabled, mode ${mode}); what is typed is not, unless ` +
      `it is shown. You and the service's administrators can play it back.${strict}`,
  };
}

/** Milliseconds as people say them. */
export function ofDuration(ms) {
  const seconds = Math.round(ms / 1000);
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  return h > 0 ? `${h} h ${m} min` : m > 0 ? `${m} min ${s} s` : `${s} s`;
}

/** The words of a button. */
export const OFFERS = {
  new: "Open a new session",
  take: "Go on here",
  retry: "Try again",
  now: "Reconnect now",
};
