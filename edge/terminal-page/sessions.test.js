import assert from "node:assert/strict";
import { test } from "node:test";

import { ofSession, sessionsOf } from "./sessions.js";

const DETACHED = {
  id: "one",
  state: "detached",
  opened_at: "2026-01-01T10:00:00Z",
  detached_at: "2026-01-01T10:05:00Z",
  ends_at: "2026-01-01T10:20:00Z",
};

const answers = (status, body, asked = []) => async (path, request) => {
  asked.push([request.method, path, request.headers.authorization]);
  return { status, json: async () => body, headers: new Map() };
};

test("the list and the end of a session are asked for as the user", async () => {
  const asked = [];
  const { list, end } = sessionsOf("rented", () => "t", answers(200, { items: [DETACHED] }, asked));
  assert.deepEqual(await list(), [DETACHED]);
  await end("one");
  assert.deepEqual(asked, [
    ["GET", "/api/v1/allocations/rented/terminal-sessions?limit=200", "Bearer t"],
    ["DELETE", "/api/v1/allocations/rented/terminal-sessions/one", "Bearer t"],
  ]);
});

test("a refusal is final, also without a login", async () => {
  await assert.rejects(sessionsOf("rented", () => null, answers(401, {})).list(), { kind: "sign-in", why: "" });
  await assert.rejects(sessionsOf("rented", () => "t", answers(401, {})).list(), { kind: "sign-in" });
  await assert.rejects(sessionsOf("rented", () => "t", answers(404, {})).end("one"), { kind: "closed" });
});

test("a row says whether a browser is connected and when a detached session ends", () => {
  const now = new Date("2026-01-01T10:10:30Z");
  assert.match(ofSession(DETACHED, null, now).text, /no browser is connected\. It ends in 10 min\.$/);
  assert.match(ofSession({ ...DETACHED, state: "attached" }, null, now).text, /open in another place\.$/);
  assert.deepEqual(ofSession(DETACHED, "one", now).isCurrent, true);
});
