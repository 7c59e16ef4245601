// One request by its correlation id, and the ways to it.
import { describe, expect, it } from "vitest";
import { fireEvent, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import type { Schemas } from "../src/api/client.ts";
import { found } from "../src/layout/palette.tsx";
import { commitsOf, targetsOf } from "../src/pages/requests.tsx";
import { allocation, ago, entity, me, uuid } from "./fixtures.ts";
import { refusal } from "./mock-api.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

const ID = "0199e3f4-5c1b-7a00-8000-0c0ffee0c0de";

const transition = (version: number, correlation_id: string, at: string): Schemas["Transition"] => ({
  version, correlation_id, at, command: "Release", from_state: "active", to_state: "releasing", actor: "user:ann", why: "released by its user",
});

function audited(...targets: Schemas["AuditTarget"][]): Schemas["AuditEntry"][] {
  return targets.map((target, seq) => ({ at: ago(7), actor: "user:ann", action: "allocations.release", target, correlation_id: ID, metadata: {}, chain: { epoch: 1, shard: 3, seq } }));
}

/** Answers the audit log and the histories of entities; counts the histories. */
function answers(items: Schemas["AuditEntry"][], reports: Record<string, Schemas["Transition"][]>): { asked: URL[] } {
  const asked: URL[] = [];
  mock.overrides.push(({ url, method }) => {
    const at = new URL(url);
    if (method !== "GET") return null;
    const [, kind, id] = /runtime\/entities\/([^/]+)\/([^/]+)$/.exec(at.pathname) ?? [];
    if (!at.pathname.endsWith("/audit-log") && !id) return null;
    asked.push(at);
    if (!id) return Response.json({ items, next_page: null });
    return Response.json({ entity: { ...entity, kind, id }, earlier_history_removed: false, history: reports[id] ?? [] } satisfies Record<keyof Schemas["EntityReport"], unknown>);
  });
  return { asked };
}

describe("the page of a request", () => {
  it("shows who sent it, and what each entity has committed for it, in the order of time", async () => {
    mock.role = "admin";
    const { asked } = answers(audited({ kind: "allocation", id: uuid(101) }, { kind: "node", id: uuid(50) }, { kind: "allocation", id: uuid(101) }), {
      [uuid(101)]: [transition(9, ID, "2026-11-29T12:00:05Z"), transition(8, "another", "2026-11-29T12:00:03Z"), transition(7, ID, "2026-11-29T12:00:01Z")],
      [uuid(50)]: [transition(41, ID, "2026-11-29T12:00:02Z")],
    });
    openConsole(`/requests?correlation_id=${ID}`);
    const commits = within(await screen.findByRole("group", { name: "Commits" }));
    const cells = (title: string) => commits.getAllByRole("row").slice(1).map((row) => row.querySelector(`[data-title="${title}"]`)?.textContent);
    expect(cells("Version")).toEqual(["7", "41", "9"]);
    expect(cells("Entity").map((text) => text?.split(" ")[0])).toEqual(["allocation", "node", "allocation"]);
    expect(within(screen.getByRole("group", { name: "Audit log" })).getAllByRole("row")).toHaveLength(4);
    expect(asked[0]?.searchParams.get("correlation_id")).toBe(ID);
    // Each entity once, however many of its actions are audited.
    expect(asked.filter(({ pathname }) => pathname.includes("/entities/"))).toHaveLength(2);
  });

  it("is searched once, and again where that is asked for: the log has no index by this id", async () => {
    mock.role = "admin";
    const { asked } = answers([], {});
    openConsole(`/requests?correlation_id=${ID}`);
    await screen.findByText(/No audited action has this correlation id/);
    const card = within(screen.getByRole("region", { name: "Audit log" }));
    fireEvent.focus(window);
    expect(asked).toHaveLength(1);
    await userEvent.click(card.getByRole("button", { name: "Read again" }));
    await waitFor(() => expect(asked).toHaveLength(2));
  });

  it("has the lines that find its log lines, with an id quoted as its reader takes it", async () => {
    mock.role = "admin";
    answers([], {});
    openConsole(`/requests?correlation_id=${encodeURIComponent(`it's "x"`)}`);
    const logs = await screen.findByRole("region", { name: "Log lines" });
    expect(within(logs).getByRole("group", { name: "command for a host of the service" }).textContent).toBe(String.raw`journalctl --unit gpuaas --output cat | grep --fixed-strings -e 'it'\''s "x"'`);
    expect(within(logs).getByRole("group", { name: "query of the log store" }).textContent).toBe(String.raw`{service="node-agent"} | json | correlation_id="it's \"x\""`);
  });

  it("says that a refused request changes nothing, where no action has its id", async () => {
    mock.role = "admin";
    answers([], {});
    openConsole(`/requests?correlation_id=${ID}`);
    expect(await screen.findByText(/No audited action has this correlation id/)).toBeTruthy();
    expect(screen.queryByRole("region", { name: "Commits" })).toBeNull();
  });

  it("reads the histories of 20 entities at most, and says so", async () => {
    mock.role = "admin";
    const { asked } = answers(audited(...Array.from({ length: 25 }, (_, index) => ({ kind: "node", id: uuid(5000 + index) }))), {});
    openConsole(`/requests?correlation_id=${ID}`);
    expect(await screen.findByText("Only the commits of the first 20 entities are read.")).toBeTruthy();
    await waitFor(() => expect(document.querySelector(".loading")).toBeNull());
    expect(asked.filter(({ pathname }) => pathname.includes("/entities/"))).toHaveLength(20);
  });

  it("goes on without the history of an entity that was removed, and says so", async () => {
    mock.role = "admin";
    mock.overrides.push(({ url }) => (new URL(url).pathname.endsWith(uuid(51)) ? refusal(404, "not_found", "There is no such entity.") : null));
    answers(audited({ kind: "node", id: uuid(50) }, { kind: "node", id: uuid(51) }), { [uuid(50)]: [transition(41, ID, "2026-11-29T12:00:02Z")] });
    openConsole(`/requests?correlation_id=${ID}`);
    expect(await screen.findByText("The history of 1 entity is not there any more.")).toBeTruthy();
    expect(within(screen.getByRole("group", { name: "Commits" })).getAllByRole("row")).toHaveLength(2);
    expect(screen.queryByRole("alert")).toBeNull();
  });

  it("shows an auditor what is audited, and names the role that sees the commits", async () => {
    mock.overrides.push(({ url }) => (new URL(url).pathname === "/api/v1/me" ? Response.json({ ...me("user"), permissions: ["read_audit"], platform_roles: ["auditor"] }) : null));
    const { asked } = answers(audited({ kind: "node", id: uuid(50) }), {});
    openConsole(`/requests?correlation_id=${ID}`);
    expect(await screen.findByText("To see its commits you need the role admin.")).toBeTruthy();
    await screen.findByRole("group", { name: "Audit log" });
    expect(asked.filter(({ pathname }) => pathname.includes("/entities/"))).toEqual([]);
    expect(screen.queryByRole("link", { name: /^node / })).toBeNull();
  });

  it("asks for nothing before an id is given, which goes into the address", async () => {
    mock.role = "admin";
    const { asked } = answers([], {});
    const { router } = openConsole("/requests");
    await screen.findByText(/Paste one to see what the request did/);
    expect(asked).toEqual([]);
    await userEvent.type(screen.getByRole("searchbox", { name: "Correlation id" }), ` ${ID} {Enter}`);
    await screen.findByRole("region", { name: "Log lines" });
    expect(router.state.location.search).toEqual({ correlation_id: ID });
  });
});

describe("the way to the page of a request", () => {
  it("is offered by the palette for a pasted id, to those who may open it", () => {
    const places = [{ to: "/requests", title: "Requests", key: "3" }];
    expect(found(places, ID).map(({ to, search }) => [to, search?.["correlation_id"]])).toEqual([[`/allocations/${ID}`, undefined], ["/requests", ID]]);
    expect(found([], ID).map(({ to }) => to)).toEqual([`/allocations/${ID}`]);
  });

  it("leads from the palette to the page, by the keyboard alone", async () => {
    mock.role = "admin";
    answers([], {});
    const { router } = openConsole("/");
    await screen.findByRole("heading", { name: "Overview" });
    fireEvent.keyDown(document.body, { key: "k", ctrlKey: true });
    await userEvent.type(await screen.findByRole("combobox"), `${ID}{ArrowDown}{Enter}`);
    await waitFor(() => expect(router.state.location.pathname).toBe("/requests"));
    expect(router.state.location.search).toEqual({ correlation_id: ID });
  });

  it.each([
    ["admin", true],
    ["user", false],
  ] as const)("is in the error that the role %s reads: %s", async (role, isOffered) => {
    mock.role = role;
    mock.overrides.push(({ url }) => (new URL(url).pathname.endsWith(`/allocations/${allocation(1).id}`) ? refusal(404, "not_found", "There is no such allocation.") : null));
    openConsole(`/allocations/${allocation(1).id}`);
    const problem = await screen.findByRole("alert");
    const link = within(problem).queryByRole("link", { name: "What the request did" });
    expect(link?.getAttribute("href") ?? null).toBe(isOffered ? "/console/requests?correlation_id=0199e3f4-cafe" : null);
  });
});

it("the targets of audited actions are each once, and commits of one moment are in the order of their versions", () => {
  const entries = audited({ kind: "node", id: "a" }, { kind: "allocation", id: "a" }, { kind: "node", id: "a" });
  expect(targetsOf(entries)).toEqual([{ kind: "node", id: "a" }, { kind: "allocation", id: "a" }]);
  const at = "2026-11-29T12:00:00Z";
  const commits = commitsOf([{ entity, history: [transition(3, ID, at), transition(2, ID, at), transition(1, "other", at)] }], ID);
  expect(commits.map(({ version }) => version)).toEqual([2, 3]);
});
