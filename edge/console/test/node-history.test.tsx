// What an administrator reads of a node's past: the outcomes of its tasks, the reports of its agent, its validations, and all of it by time.
import { describe, expect, it } from "vitest";
import { act, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import type { Schemas } from "../src/api/client.ts";
import { timelineOf } from "../src/pages/node-timeline.tsx";
import { validationsOf } from "../src/pages/node-validations.tsx";
import { shortId } from "../src/format/text.ts";
import { ago, allocation, me, node, uuid } from "./fixtures.ts";
import { refusal } from "./mock-api.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

type Outcome = Schemas["NodeTaskOutcome"];

const ADDRESS = `/nodes/${uuid(50)}`;
const TASKS = `/api/v1/admin${ADDRESS}/tasks`;

const outcome = (number: number, minutes: number, change: Partial<Outcome> = {}): Outcome => ({
  task_id: uuid(2000 + number), type: "diagnostics.collect", attempt: 1, succeeded: true, ended_at: ago(minutes), output: { disks: "ok" }, ...change,
});

const report = (generation: number): Schemas["NodeReport"] => ({ at: ago(200 - generation), outcome: `report ${generation}`, generation, correlation_id: `0199e3f4-5c1b-7a00-8000-${String(generation).padStart(12, "0")}`, task_id: uuid(3000 + generation) });

function tasksAre(ended: Outcome[], pages: Record<string, [reports: Schemas["NodeReport"][], next: string | null]> = { "": [[], null] }): URL[] {
  const asked: URL[] = [];
  mock.role = "admin";
  mock.overrides.push(({ url, method }) => {
    const at = new URL(url);
    if (method !== "GET" || at.pathname !== TASKS) return null;
    asked.push(at);
    const page = pages[at.searchParams.get("page_token") ?? ""];
    if (!page) return refusal(400, "invalid_request", "The page token is not one of this list.");
    return Response.json({ open: [], ended, reports: page[0], next_page: page[1] } satisfies Schemas["NodeTasks"]);
  });
  return asked;
}

const columnOf = async (table: string, title: string) => {
  const rows = within(await screen.findByRole("group", { name: table })).getAllByRole("row").slice(1);
  return rows.map((row) => row.querySelector(`[data-title="${title}"]`)?.textContent);
};

describe("the ended tasks of a node", () => {
  it("have the newest first, with their output", async () => {
    // As the API answers: the oldest first.
    tasksAre([outcome(1, 90, { output: { first: true } }), outcome(2, 10, { output: { second: true } }), outcome(3, 5, { output: null, succeeded: false, error: { code: "timeout", message: "It took too long." } })]);
    openConsole(ADDRESS);
    expect(await columnOf("Ended tasks", "Error")).toEqual(["It took too long.", "–", "–"]);
    const outputs = within(screen.getByRole("group", { name: "Ended tasks" })).getAllByRole("group", { name: "output of diagnostics.collect" });
    expect(outputs.map(({ textContent }) => JSON.parse(textContent ?? ""))).toEqual([{ second: true }, { first: true }]);
  });
});

describe("the tenants of a node", () => {
  const tenant = (number: number, change: Partial<Schemas["Allocation"]>) => allocation(number, { node_id: uuid(50), user_id: "ann", name: null, gpu_count: 2, ...change });
  function tenantsAre(items: Schemas["Allocation"][]): (string | null)[] {
    const asked: (string | null)[] = [];
    mock.role = "admin";
    mock.overrides.push(({ url, method }) => {
      const at = new URL(url);
      if (method !== "GET" || at.pathname !== "/api/v1/allocations") return null;
      asked.push(at.searchParams.get("node_id"));
      return Response.json({ items, next_page: null });
    });
    return asked;
  }
  const former = tenant(1, { state: "released", requested_at: ago(901), active_at: ago(900), released_at: ago(400) });
  const present = tenant(2, { state: "active", user_id: "bob", name: "train", gpu_count: 1, requested_at: ago(91), active_at: ago(90), released_at: null });

  it("are those on it and its former ones, the newest first, with their times", async () => {
    // As the API answers.
    const asked = tenantsAre([present, former]);
    openConsole(ADDRESS);
    expect(await columnOf("Tenants", "User")).toEqual(["bob", "ann"]);
    expect(await columnOf("Tenants", "State")).toEqual(["active", "released"]);
    expect((await columnOf("Tenants", "Released")).map((text) => text === "–")).toEqual([true, false]);
    expect(new Set(asked)).toEqual(new Set([uuid(50)]));
  });

  it("are in its timeline", async () => {
    expect(timelineOf(node(0), [], [former, present]).filter(({ what }) => what.startsWith("Tenant")).map(({ what, state, note }) => [what, state, note])).toEqual([
      ["Tenant bob, allocation train", "active", "1 GPU"],
      [`Tenant ann, allocation ${shortId(former.id)}`, "released", "2 GPUs"],
      [`Tenant ann, allocation ${shortId(former.id)}`, "active", "2 GPUs"],
    ]);
    tenantsAre([present, former]);
    openConsole(ADDRESS);
    await waitFor(async () => expect((await columnOf("Timeline", "What")).filter((what) => what?.startsWith("Tenant"))).toHaveLength(3));
  });

  it("include the present ones where there are more than are read, and say what is left out", async () => {
    mock.role = "admin";
    mock.overrides.push(({ url, method }) => {
      const at = new URL(url);
      if (method !== "GET" || at.pathname !== "/api/v1/allocations") return null;
      const state = at.searchParams.get("state");
      if (state) return Response.json({ items: state === "active" ? [present] : [], next_page: null });
      const page = Number(at.searchParams.get("page_token") ?? 0);
      const items = Array.from({ length: 200 }, (_, index) => tenant(10_000 + page * 200 + index, { state: "released", released_at: ago(400) }));
      return Response.json({ items, next_page: String(page + 1) });
    });
    openConsole(ADDRESS);
    expect((await columnOf("Tenants", "User")).slice(0, 2)).toEqual(["bob", "ann"]);
    expect(screen.getByText(/earlier ones that are released are left out/)).toBeTruthy();
  });

  it("that never came to run are not in its timeline", () => {
    expect(timelineOf(node(0), [], [tenant(3, { state: "provisioning", active_at: null, released_at: null })]).some(({ what }) => what.startsWith("Tenant"))).toBe(false);
  });
});

describe("the reports of a node's agent", () => {
  const PAGES: Parameters<typeof tasksAre>[1] = { "": [[report(9), report(8)], "older"], older: [[report(7)], null] };

  it("are paged by the server, and the page is in the address", async () => {
    const asked = tasksAre([], PAGES);
    const { router } = openConsole(ADDRESS);
    expect(await columnOf("Reports of its agent", "Outcome")).toEqual(["report 9", "report 8"]);
    await userEvent.click(within(screen.getByRole("navigation", { name: "Pages of Reports" })).getByRole("button", { name: "Next page" }));
    await waitFor(async () => expect(await columnOf("Reports of its agent", "Outcome")).toEqual(["report 7"]));
    expect(router.state.location.search).toEqual({ reports_page: "older" });
    expect(asked.at(-1)?.searchParams.get("page_token")).toBe("older");
    act(() => router.history.back());
    await waitFor(async () => expect(await columnOf("Reports of its agent", "Outcome")).toEqual(["report 9", "report 8"]));
  });

  it("whose page is refused lead back to the first page", async () => {
    tasksAre([], PAGES);
    openConsole(`${ADDRESS}?reports_page=forged`);
    await screen.findByText("The page token is not one of this list.");
    await userEvent.click(screen.getByRole("button", { name: "First page" }));
    expect(await columnOf("Reports of its agent", "Outcome")).toEqual(["report 9", "report 8"]);
  });

  it("lead to their requests, where the caller may see these", async () => {
    tasksAre([], PAGES);
    const { unmount } = openConsole(ADDRESS);
    const link = within(await screen.findByRole("group", { name: "Reports of its agent" })).getAllByRole("link")[0];
    expect(link?.getAttribute("href")).toBe(`/console/requests?correlation_id=${report(9).correlation_id}`);
    unmount();
    mock.overrides.unshift(({ url }) => (new URL(url).pathname === "/api/v1/me" ? Response.json({ ...me("user"), permissions: ["manage_nodes"] }) : null));
    openConsole(ADDRESS);
    expect(within(await screen.findByRole("group", { name: "Reports of its agent" })).queryAllByRole("link")).toEqual([]);
  });
});

describe("the validations of a node", () => {
  const JUDGED: Schemas["NodeValidation"] = {
    task_id: uuid(2002), level: "deep", ended_at: ago(10), passed: false, measurements: { gpu_memory_gib_per_s: 2100 }, shortfalls: ["gpu_memory_gib_per_s is 2100, and 2400 are needed"], not_tested: { peer_copy: "one GPU" },
  };
  const measures = (number: number, minutes: number, value: number) =>
    outcome(number, minutes, { type: "node.validate", output: { level: "quick", measurements: { gpu_memory_gib_per_s: value, broken: "x" }, not_tested: {} } });

  it("are those that are remembered, the newest first; the last one as its SKU judged it", () => {
    const results = validationsOf({ validation: JUDGED }, [measures(1, 900, 2600), measures(2, 10, 2100), outcome(3, 1)]);
    expect(results.map(({ level, passed, measurements }) => [level, passed, measurements["gpu_memory_gib_per_s"]])).toEqual([["deep", false, 2100], ["quick", null, 2600]]);
    expect(results[0]?.problems).toEqual(["gpu_memory_gib_per_s is 2100, and 2400 are needed", "peer_copy was not tested: one GPU"]);
    // What is no number is no measurement.
    expect(results[1]?.measurements).toEqual({ gpu_memory_gib_per_s: 2600 });
  });

  it("of any output are read without a fault", () => {
    const outputs = [null, {}, { measurements: null }, { measurements: [1] }, { level: 7, measurements: "x" }] as (Record<string, unknown> | null)[];
    const results = validationsOf({ validation: null }, outputs.map((output, index) => outcome(index, index, { type: "node.validate", output })));
    expect(results.map(({ level }) => level)).toEqual([null, null, null, null, null]);
  });

  it("are on the page of the node", async () => {
    tasksAre([measures(1, 900, 2600)]);
    openConsole(ADDRESS);
    expect(await columnOf("Validations", "Measured")).toEqual([`gpu_memory_gib_per_s=${new Intl.NumberFormat().format(2600)}`]);
    expect(await columnOf("Validations", "Result")).toEqual(["measured"]);
  });
});

describe("the timeline of a node", () => {
  it("has its findings, repairs, holds and tasks in one order of time, the newest first", () => {
    const base = node(0);
    const finding = { ...base.health.findings[0], id: "f", probe: "xid", code: "79", classes: [], cause: "hardware", repair: "reboot", count: 1, boot_id: "b", detail: "", first_at: ago(60), last_at: ago(60) };
    const entries = timelineOf(
      node(0, {
        created_at: ago(9000),
        state_entered_at: ago(50),
        health: { status: "warning", alerts: [], findings: [{ ...finding, opened_at: ago(60), cleared_at: ago(20), cleared_reason: "a new riser", meaning: "GPU has fallen off the bus" }] },
        quarantine_holds: [{ code: "health", message: "GPU 3", author: "health", since_at: ago(59) }],
        repair: { attempts: 2, begun_at: ago(40), phase: "succeeded" },
        gpu_resets: [{ gpu_uuid: uuid(7), begun_at: ago(30), phase: "failed", error: "busy" }],
      }),
      [outcome(1, 10)],
    );
    expect(entries.map(({ what, state }) => `${what}: ${state}`)).toEqual([
      "Task diagnostics.collect: succeeded", "Finding xid 79: cleared", "Reset of GPU 0199…00000007: failed", "Repair by a reboot: succeeded", "State of the node: active", "Held in quarantine by health: health",
      "Finding xid 79: found", "Registered: registered",
    ]);
    expect(entries.find(({ state }) => state === "cleared")?.note).toBe("a new riser");
  });

  it("has a validation once, though its task has an outcome, too", () => {
    const validation = { task_id: uuid(2001), level: "deep" as const, ended_at: ago(5), passed: true, measurements: {}, shortfalls: [], not_tested: {} };
    const entries = timelineOf(node(0, { validation }), [outcome(1, 5, { type: "node.validate" })]);
    expect(entries.filter(({ what }) => /[Vv]alidat/.test(what)).map(({ what }) => what)).toEqual(["Validation, deep"]);
  });
});
