// What is wrong with members: parked workers, consumers that lag, clocks that are off; each with its cause, its runbook and its remedy.
import { beforeEach, describe, expect, it, vi } from "vitest";
import { screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import type { Schemas } from "../src/api/client.ts";
import { eventStream } from "../src/live/browser.ts";
import { troubledMembers, troublesOf } from "../src/pages/member-troubles.tsx";
import { answers } from "./answers.ts";
import { ago, tree, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

type Worker = Schemas["WorkerNode"];
type Member = Schemas["MemberNode"];

const worker = (name: string, change: Partial<Worker> = {}): Worker => ({
  name, what: `consumer of stream ${name}`, state: "running", under: "provisioning", restarts: 0, restartable: true, since: ago(5000), ...change,
});
const consumer = (waiting: number, under_way = 0): Worker => worker("node-events", { queue: { waiting, under_way, bound: null } });
const member = (number: number, workers: Worker[], change: Partial<Member> = {}): Member => ({
  id: uuid(700 + number), name: `replica-${number}`, awake: 40, mailbox_depth: 0, shards: 128, started_at: ago(5000), version: "0.1.0", workers, ...change,
});

/** The members that the tree has, with nothing overdue or parked. */
const membersAre = (...members: Member[]) => answers("/api/v1/admin/runtime/tree", () => Response.json({ ...tree([]), members }));

/** A number as the device writes it. */
const shown = (value: number) => new Intl.NumberFormat().format(value);

const LAG = "worker node-events (consumer of stream node-events) lags: events wait for their effect";

describe("troubles of members", () => {
  it("are those that the alerts report: no lag of a thousand, no clock that is two seconds off, no worker that restarts by itself", () => {
    const busy = worker("committer-1", { queue: { waiting: 4000, under_way: 0, bound: 4096 } });
    const restarting = worker("provisioning-events", { state: "backing_off", last_error: "NATS does not answer" });
    expect(troublesOf([member(1, [consumer(1000), busy, restarting], { clock_offset_ms: -2000 }), member(2, [])])).toEqual([]);
  });

  it("are one cause for all members that have it, with its runbook", () => {
    const dead = worker("timers", { what: "sends ticks", state: "parked", restarts: 10, last_error: "no policy" });
    const causes = troublesOf([member(1, [consumer(1001, 3), dead], { clock_offset_ms: 30_000 }), member(2, [consumer(1001, 3)], { clock_offset_ms: -2001 })]);
    expect(causes.map(({ cause, runbook, troubles }) => [cause, runbook, troubles.map((it) => `${it.member.name} ${it.seen}`)])).toEqual([
      ["worker timers (sends ticks) is parked: no policy", "ops.api.degradation", ["replica-1 parked after 10 restarts"]],
      [LAG, "ops.bus.backlog", [1, 2].map((number) => `replica-${number} ${shown(1001)} events wait, 3 are being processed`)],
      ["member: its clock differs from Postgres' clock", "ops.api.degradation", [`replica-1 ${shown(30_000)} ms ahead`, `replica-2 ${shown(2001)} ms behind`]],
    ]);
    expect(troubledMembers(causes)).toBe(2);
  });
});

describe("members in trouble", () => {
  beforeEach(() => {
    mock.role = "operator";
    // With a stream, nothing is polled within a minute.
    vi.spyOn(eventStream, "current").mockReturnValue("live");
  });

  it("are counted on the page of the fleet, which leads to their causes", async () => {
    membersAre(member(1, [consumer(5000)]), member(2, [], { clock_offset_ms: 9000 }), member(3, []));
    openConsole("/operations");
    const term = await screen.findByText("Members in trouble");
    await waitFor(() => expect(term.nextElementSibling?.textContent).toBe("2"));
    await userEvent.click(within(term.parentElement as HTMLElement).getByRole("link", { name: "See why" }));
    expect(await screen.findByRole("region", { name: `1 × ${LAG}` })).toBeTruthy();
    expect(screen.getByRole("region", { name: "1 × member: its clock differs from Postgres' clock" }).textContent).toContain("timedatectl");
    expect(screen.queryByText("Nothing is stuck.")).toBeNull();
  });

  it("have the restart of their worker as a remedy, and are gone after it", async () => {
    membersAre(member(1, [consumer(5000)]));
    openConsole("/stuck");
    const cause = within(await screen.findByRole("region", { name: `1 × ${LAG}` }));
    expect(cause.getByText("ops.bus.backlog")).toBeTruthy();
    await userEvent.click(cause.getByRole("button", { name: "Restart…" }));
    await userEvent.type(await screen.findByLabelText(/^Reason/), "it hangs");
    mock.overrides.length = 0;
    membersAre(member(1, [consumer(0)]));
    await userEvent.click(screen.getByRole("button", { name: "Restart" }));
    expect(await screen.findByText("Nothing is stuck.")).toBeTruthy();
    expect(mock.sent.map(({ path, body }) => [path, body])).toEqual([[`/api/v1/admin/runtime/members/${uuid(701)}/workers/node-events/restart`, { reason: "it hangs" }]]);
  });

  it("have no button where only the machine can be repaired", async () => {
    membersAre(member(1, [], { clock_offset_ms: 9000 }));
    openConsole("/stuck");
    const cause = within(await screen.findByRole("region", { name: /its clock differs/ }));
    expect(cause.queryAllByRole("button")).toEqual([]);
    expect(cause.getByRole("link", { name: "In the tree" }).getAttribute("href")).toBe("/console/tree");
  });
});

describe("the tree of members", () => {
  it("shows the queue of each worker: what waits, of what may wait", async () => {
    mock.role = "operator";
    membersAre(member(1, [consumer(12), worker("outbox-relay", { queue: { waiting: 3, under_way: 0, bound: 1000 } }), worker("timers")]));
    openConsole("/tree");
    const rows = within(await screen.findByRole("group", { name: "Workers of replica-1", hidden: true })).getAllByRole("row", { hidden: true });
    expect(rows.slice(1).map((row) => row.querySelector('[data-title="Queue"]')?.textContent)).toEqual(["12", `3 of ${shown(1000)}`, "–"]);
  });
});
