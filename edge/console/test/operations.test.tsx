// Pages of operators: alerts, stuck entities, histories.
import { readFileSync } from "node:fs";
import { describe, expect, it, vi } from "vitest";
import { screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import type { Schemas } from "../src/api/client.ts";
import { eventStream } from "../src/live/browser.ts";
import { answers } from "./answers.ts";
import { alerts, allocation, entity, tree, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

describe("alerts", () => {
  const answer = (change: object) =>
    mock.overrides.push(({ url }) => (url.endsWith("/admin/alerts") ? Response.json({ at: new Date().toISOString(), is_configured: true, items: alerts, total: alerts.length, ...change }) : null));
  it("are listed with their runbooks, without the watchdog", async () => {
    mock.role = "operator";
    openConsole("/alerts");
    expect(await screen.findByText("GPUAASReplicaDown")).toBeTruthy();
    expect(screen.getByText("ops.api.degradation")).toBeTruthy();
    expect(screen.getByText("sku h100-8, region eu-west-1")).toBeTruthy();
    expect(screen.getByText("inhibited: its cause fires")).toBeTruthy();
    expect(screen.queryByText("GPUAASWatchdog")).toBeNull();
    expect(screen.queryByText(/The watchdog, which always fires, is missing/)).toBeNull();
  });
  it("without the watchdog are not to be trusted", async () => {
    mock.role = "operator";
    answer({ items: [], total: 0 });
    openConsole("/alerts");
    expect(await screen.findByText(/The watchdog, which always fires, is missing/)).toBeTruthy();
    expect(screen.getByText("Nothing fires.")).toBeTruthy();
  });
  it("without an Alertmanager are unknown, which is not the same as none", async () => {
    mock.role = "operator";
    answer({ is_configured: false, items: [], total: 0 });
    openConsole("/alerts");
    expect(await screen.findByText(/No Alertmanager is configured/)).toBeTruthy();
    expect(screen.queryByText("Nothing fires.")).toBeNull();
  });
});

describe("stuck entities", () => {
  it("are listed by their cause, with its runbook", async () => {
    mock.role = "operator";
    openConsole("/stuck");
    const cause = within(await screen.findByRole("region", { name: "1 × allocation: agent has not confirmed the clean-up" }));
    expect(cause.getByText("ops.provisioning.stuck")).toBeTruthy();
  });
  it("have a shortened id on one line, whose title is the whole", async () => {
    mock.role = "operator";
    openConsole("/stuck");
    const id = await screen.findByTitle(entity.id);
    expect(id.textContent).toBe("0199…00000103");
    expect(id.closest("a")?.getAttribute("href")).toBe(`/console/entities/allocation/${entity.id}`);
    // The rule that breaks no line in it.
    expect(readFileSync("src/style/base.css", "utf8")).toContain(`${id.localName}[title] { white-space: nowrap; }`);
  });
  /** What is stuck, in place of the usual answer: all of it overdue, or parked. */
  const areStuck = (entities: Schemas["EntityNode"][]) =>
    answers("/api/v1/admin/runtime/tree", (query) => Response.json(tree(entities.filter(({ status }) => (query.get("parked") === "true") === (status === "parked")))));
  it("are repaired from their row, by the keyboard alone", async () => {
    mock.role = "operator";
    // With a stream, nothing is polled within a minute: no row is drawn again while the keyboard is on its way.
    vi.spyOn(eventStream, "current").mockReturnValue("live");
    openConsole("/stuck");
    const button = await screen.findByRole("button", { name: "Retry the release…" });
    while (document.activeElement !== button) await userEvent.tab();
    await userEvent.keyboard("{Enter}");
    await userEvent.type(await screen.findByLabelText("Reason"), "the node is back{Enter}");
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    expect(mock.sent.map(({ path, body }) => [path, body])).toEqual([[`/api/v1/admin/allocations/${entity.id}/retry-release`, { reason: "the node is back" }]]);
  });
  it("are read again after a remedy", async () => {
    mock.role = "operator";
    // With a stream, nothing is polled within a minute.
    vi.spyOn(eventStream, "current").mockReturnValue("live");
    openConsole("/stuck");
    await userEvent.click(await screen.findByRole("button", { name: "Force the release…" }));
    await userEvent.type(await screen.findByLabelText("Reason"), "the node is gone");
    areStuck([]);
    await userEvent.click(screen.getByRole("button", { name: "Force the release" }));
    expect(await screen.findByText("Nothing is stuck.")).toBeTruthy();
  });
  it("have the remedies of their kind and state, and none that would be refused", async () => {
    mock.role = "operator";
    const of = (kind: string, state: string, change: Partial<Schemas["EntityNode"]> = {}) => ({ ...entity, id: `${kind}-${state}`, kind, state, waits_for: `${kind} ${state}`, ...change });
    areStuck([
      of("allocation", "release_failed"), of("allocation", "provisioning"), of("processor_event", "dead"), of("processor_event", "received"), of("rollout", "stopped"), of("rollout", "running"),
      of("terminal_session", "attached"), of("node", "quarantined"), of("rollout", "stopped", { id: "parked", status: "parked", last_error: "it panicked" }),
    ]);
    openConsole("/stuck");
    const offered = async (cause: string) => {
      const region = within(await screen.findByRole("region", { name: `1 × ${cause}` }));
      const row = within(region.getAllByRole("row")[1] as HTMLElement);
      return [...row.getAllByRole("button"), ...row.getAllByRole("link").slice(1)].map(({ textContent }) => textContent);
    };
    expect(await offered("allocation: allocation release_failed")).toEqual(["Retry the release…", "Force the release…", "Restart…", "Its page"]);
    expect(await offered("allocation: allocation provisioning")).toEqual(["Restart…", "Its page"]);
    expect(await offered("processor event: processor_event dead")).toEqual(["Retry…", "Dismiss…", "Restart…", "Payment events"]);
    expect(await offered("processor event: processor_event received")).toEqual(["Retry…", "Dismiss…", "Restart…", "Payment events"]);
    expect(await offered("rollout: rollout stopped")).toEqual(["Resume…", "Abort…", "Restart…", "Its page"]);
    expect(await offered("rollout: rollout running")).toEqual(["Restart…", "Its page"]);
    expect(await offered("terminal session: terminal_session attached")).toEqual(["End…", "Restart…", "Terminals"]);
    expect(await offered("node: node quarantined")).toEqual(["Restart…", "Its page"]);
    // A parked entity takes no command before it is restarted.
    expect(await offered("rollout: it panicked")).toEqual(["Restart…", "Its page"]);
  });
  it("that are payments are decided about by the name of what was paid, which is read first", async () => {
    mock.role = "operator";
    vi.spyOn(eventStream, "current").mockReturnValue("live");
    areStuck([{ ...entity, id: uuid(402), kind: "payment", state: "under_review", waits_for: "an operator" }]);
    openConsole("/stuck");
    await userEvent.click(await screen.findByRole("button", { name: "Decide" }));
    await userEvent.click(await screen.findByRole("button", { name: "Settle…" }));
    expect(screen.getByText("42.00 GBP was paid")).toBeTruthy();
    await userEvent.type(await screen.findByLabelText("Reason"), "credited{Enter}");
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    const sent = mock.sent.map(({ path, body }) => [path, body]);
    expect(sent).toEqual([[`/api/v1/admin/billing/payments/${uuid(402)}/settle-review`, { review: "pi_1:4200:GBP", reason: "credited" }]]);
  });
  it("beyond those that are shown are counted, and lead to the tree", async () => {
    mock.role = "operator";
    areStuck(Array.from({ length: 103 }, (_, index) => ({ ...entity, id: uuid(8000 + index) })));
    const { router } = openConsole("/stuck");
    const cause = within(await screen.findByRole("region", { name: /^103 × allocation/ }));
    expect(cause.getAllByRole("row")).toHaveLength(101);
    expect(cause.getByText(/^3 more have this cause/)).toBeTruthy();
    await userEvent.click(cause.getByRole("link", { name: "see them in the tree" }));
    await screen.findByRole("heading", { level: 1, name: "Tree" });
    expect(router.state.location.search).toEqual({ kind: "allocation", state: "release_failed", overdue: "true" });
  });
});

describe("the history of an entity", () => {
  it("has the newest transition first, as it says", async () => {
    mock.role = "operator";
    openConsole(`/entities/allocation/${allocation(1).id}`);
    expect(await screen.findByText("The last 2 transitions, the newest first.")).toBeTruthy();
    const rows = within(screen.getByRole("group", { name: "History" })).getAllByRole("row");
    expect(rows.slice(1).map((row) => row.querySelector("td")?.textContent)).toEqual(["8", "7"]);
    // What was removed is older than the last row.
    const removed = screen.getByText(/Earlier transitions were removed/);
    expect(rows.at(-1)?.compareDocumentPosition(removed)).toBe(Node.DOCUMENT_POSITION_FOLLOWING);
  });
});
