import assert from "node:assert/strict";
import { test } from "node:test";

import { logOut, minting, reading } from "./api.js";
import { OFFERS, ofClose, ofDuration, ofRecording, ofRefusal } from "./messages.js";

test("every close code of the service has a message with the next step", () => {
  for (const code of [1000, 1001, 1006, 1008, 1009, 1011, 1012, 1013, 4401, 4403, 4408, 4409]) {
    const verdict = ofClose(code, null);
    assert.ok(verdict.why.length > 10, String(code));
    assert.ok(verdict.kind === "again" || verdict.next in OFFERS, String(code));
  }
  assert.equal(ofClose(1000, { code: null, signal: 9 }).why, "The program was ended by signal 9.");
  assert.match(ofClose(4403, null).why, /your login has ended/);
  assert.equal(ofClose(1000, { code: 0, signal: null }).why, "The program ended with 0.");
});

test("a refusal says what the service says, and where to ask", () => {
  const body = { message: "An allocation that is released has no terminal.", correlation_id: "abc" };
  assert.deepEqual(ofRefusal(409, body, 0, false).why, "An allocation that is released has no terminal. (abc)");
  assert.equal(ofRefusal(409, body, 0, true).next, "new");
  assert.equal(ofRefusal(401, {}, 0, false).kind, "sign-in");
  assert.deepEqual(ofRefusal(429, {}, 20, false), { kind: "again", why: "The service answers 429.", next: null, seconds: 20 });
});

test("a recorded user learns who records, by which policy, and who can see it", () => {
  for (const mode of ["best-effort", "strict"]) {
    const { short, long } = ofRecording(mode);
    assert.match(short, /^Recorded/);
    for (const said of [mode, "terminal.recording_enabled", "by the service", "administrators"]) {
      assert.ok(long.includes(said), said);
    }
  }
  assert.match(ofRecording("off").short, /^Not/);
});

test("a recording is so long", () => {
  assert.deepEqual([400, 61_000, 7_260_000].map(ofDuration), ["0 s", "1 min 1 s", "2 h 1 min"]);
});

const answer = (status, body, headers = {}) => new Response(JSON.stringify(body), { status, headers });

test("the access token goes into a header of one request to this service, and nowhere else", async () => {
  let asked;
  const mint = minting("a", () => "secret", async (path, how) => {
    asked = { path, how };
    return answer(201, { token: "t", session_id: "s", websocket_url: "wss://x" });
  });
  assert.equal((await mint("s")).token, "t");
  assert.equal(asked.path, "/api/v1/allocations/a/terminal-tokens");
  assert.equal(asked.how.headers.authorization, "Bearer secret");
  assert.equal(asked.how.credentials, "omit");
  assert.equal(asked.how.body, '{"session_id":"s"}');
  assert.equal(asked.how.redirect, "error");
});

test("without an access token the login to the web console is used, and without either the page asks who it is", async () => {
  let asked;
  const mint = (status, body) =>
    minting("a", () => null, async (_, how) => {
      asked = how;
      return answer(status, body);
    })(null);
  assert.equal((await mint(201, { token: "t", session_id: "s", websocket_url: "wss://x" })).token, "t");
  assert.equal(asked.credentials, "same-origin");
  assert.equal(asked.headers.authorization, undefined);
  await assert.rejects(mint(401, { code: "unauthorized" }), { kind: "sign-in", why: "" });
  await assert.rejects(mint(401, { code: "session_ended" }), { kind: "sign-in", why: "Your login has ended." });
});

test("the end of a login to the web console names the path that leads to the identity provider's own", async () => {
  const asked = [];
  const answered = await logOut(async (path, how) => {
    asked.push(path, how.method, how.credentials);
    return answer(200, { logout_url: "/console/logout" });
  });
  assert.deepEqual([answered, ...asked], ["/console/logout", "/console/logout", "POST", "same-origin"]);
  assert.equal(await logOut(async () => answer(401, {})), null);
});

test("an answer that is none, and a rubbish one, are tried again or said", async () => {
  const unreachable = minting("a", () => "x", async () => Promise.reject(new TypeError("network")));
  await assert.rejects(unreachable(null), (verdict) => verdict.kind === "again");
  const rubbish = minting("a", () => "x", async () => new Response("<html>", { status: 502 }));
  await assert.rejects(rubbish(null), (verdict) => verdict.kind === "again");
  const limited = minting("a", () => "x", async () => answer(429, { message: "Too many." }, { "retry-after": "7" }));
  await assert.rejects(limited(null), (verdict) => verdict.seconds === 7);
});

test("a recording is fetched with the access token in a header, and what is refused is said", async () => {
  let asked;
  const fetchOf = reading("r", () => "secret", async (path, how) => {
    asked = { path, how };
    return answer(200, { id: "r" });
  });
  assert.deepEqual(await (await fetchOf("")).json(), { id: "r" });
  assert.equal(asked.path, "/api/v1/recordings/r");
  assert.equal(asked.how.headers.authorization, "Bearer secret");
  assert.equal(asked.how.redirect, "error");
  const refused = (status, body = {}) => reading("r", () => "x", async () => answer(status, body))("/asciicast");
  await assert.rejects(refused(401), (verdict) => verdict.kind === "sign-in");
  await assert.rejects(refused(404), (verdict) => /no such recording/.test(verdict.why));
  await assert.rejects(refused(403, { message: "No.", correlation_id: "abc" }), (verdict) => verdict.why === "No. (abc)");
  await assert.rejects(reading("r", () => "x", async () => Promise.reject(new TypeError("network")))(""), (verdict) =>
    /cannot be reached/.test(verdict.why));
});
