// Pages: what each role is offered, and how answers are shown.
import { readFileSync } from "node:fs";
import { describe, expect, it, vi } from "vitest";
import { act, cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import type { Schemas } from "../src/api/client.ts";
import { ApiFailure } from "../src/api/failure.ts";
import { retries, retryDelay } from "../src/api/query-client.ts";
import { eventStream } from "../src/live/browser.ts";
import { openMessages, remember, rememberRented } from "../src/live/messages.ts";
import { logOut } from "../src/session/console-api.ts";
import { ago, alerts, allocation, entity, me, node, payment, posting, sku, sshKey, STRANGE_NAMES, terminal, tree, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";
import { refusal } from "./mock-api.ts";
import { tallWindow } from "./tall-window.ts";

const navigation = async () => within(await screen.findByRole("navigation", { name: "Console" }));

describe("what is offered", () => {
  it("to a user is no page of administrators", async () => {
    openConsole("/");
    const places = await navigation();
    expect(places.getByRole("link", { name: "Allocations" })).toBeTruthy();
    expect(places.queryByRole("link", { name: "Nodes" })).toBeNull();
    expect(places.queryByText("Operations")).toBeNull();
  });
  it("to an administrator is all of them", async () => {
    mock.role = "admin";
    openConsole("/");
    const places = await navigation();
    for (const name of ["Nodes", "SKUs", "Policies", "Audit log", "Fleet", "Tree", "Stuck"]) expect(places.getByRole("link", { name })).toBeTruthy();
  });
  it("names the role that a page needs", async () => {
    openConsole("/audit");
    expect(await screen.findByText(/needs the role admin or auditor/)).toBeTruthy();
  });
  it("names every role that is enough for a page of users", async () => {
    answers("/api/v1/me", () => Response.json({ ...me("user"), permissions: [] }));
    openConsole("/rent");
    expect(await screen.findByText(/needs the role user or admin\./)).toBeTruthy();
  });
});

describe("names of other people", () => {
  it("are text, whatever they contain", async () => {
    openConsole("/allocations");
    for (const name of STRANGE_NAMES) expect(await screen.findByText(name)).toBeTruthy();
    expect(document.querySelector("main img, main script")).toBeNull();
  });
});

describe("balances", () => {
  it("of any size are exact", async () => {
    const huge = JSON.stringify({ ...mock.balance, available_minor: 0 }).replace('"available_minor":0', '"available_minor":9007199254740993');
    mock.overrides.push(({ url }) => (url.endsWith("/billing/balance") ? new Response(huge, { headers: { "Content-Type": "application/json" } }) : null));
    openConsole("/");
    await waitFor(() => expect(document.body.textContent?.replace(/[^\d.]/g, "")).toContain("90071992547409.93"));
  });
  it("that are used up say when what runs is released", async () => {
    mock.balance = { ...mock.balance, release_at: new Date(Date.now() + 600_000).toISOString(), is_low: true };
    openConsole("/");
    expect(await screen.findByText(/The balance is used up/)).toBeTruthy();
  });
});

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
    expect(await offered("processor event: processor_event received")).toEqual(["Restart…", "Payment events"]);
    expect(await offered("rollout: rollout stopped")).toEqual(["Resume…", "Abort…", "Restart…", "Its page"]);
    expect(await offered("rollout: rollout running")).toEqual(["Restart…", "Its page"]);
    expect(await offered("terminal session: terminal_session attached")).toEqual(["End…", "Restart…", "Terminals"]);
    expect(await offered("node: node quarantined")).toEqual(["Restart…", "Its page"]);
    // A parked entity takes no command before it is restarted.
    expect(await offered("rollout: it panicked")).toEqual(["Restart…", "Its page"]);
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

describe("the title of the browser's tab", () => {
  it.each([
    ["/allocations", "Allocations · gpuaas"],
    [`/allocations/${allocation(1).id}`, "training-1 · gpuaas"],
    [`/nodes/${node(0).id}`, "rack-0 · gpuaas"],
    ["/nowhere", "No such page · gpuaas"],
  ])("of %s is %s", async (address, title) => {
    mock.role = "admin";
    openConsole(address);
    await waitFor(() => expect(document.title).toBe(title));
  });
  it("of a page that is refused is not that of the page before", async () => {
    const { router } = openConsole("/money");
    await waitFor(() => expect(document.title).toBe("Money · gpuaas"));
    act(() => router.history.push("/console/audit"));
    await waitFor(() => expect(document.title).toBe("Another role is needed · gpuaas"));
  });
  it("of a page that cannot be read is the site's alone", async () => {
    const { router } = openConsole("/allocations");
    await waitFor(() => expect(document.title).toBe("Allocations · gpuaas"));
    answers(`/api/v1/allocations/${uuid(4)}`, () => refusal(404, "not_found", "There is no such allocation."));
    act(() => router.history.push(`/console/allocations/${uuid(4)}`));
    await screen.findByText("There is no such allocation.");
    await waitFor(() => expect(document.title).toBe("gpuaas"));
  });
});

describe("a form that is refused", () => {
  it("names its own field, and no place in the request", async () => {
    const message = "Field `gpu_count` cannot be read: expected a whole number (line 1, column 99).";
    mock.overrides.push(({ method }) => (method === "POST" ? refusal(400, "invalid_request", message, {}, { field: "gpu_count", line: 1, column: 99 }) : null));
    openConsole("/rent?sku=h100-8");
    await userEvent.click(await screen.findByRole("button", { name: "Rent" }));
    expect(await screen.findByText("“GPUs” cannot be read: expected a whole number.")).toBeTruthy();
    expect(screen.getByText("0199e3f4-cafe")).toBeTruthy();
    expect(document.body.textContent).not.toMatch(/line 1|column/);
  });
});

describe("the page of money", () => {
  it("asks for the balance and the payments once, and pages of postings only where they are new", async () => {
    // With a stream, nothing is polled within a minute.
    vi.spyOn(eventStream, "current").mockReturnValue("live");
    const asked: string[] = [];
    mock.overrides.push(({ url }) => {
      asked.push(new URL(url).pathname.replace("/api/v1/billing/", ""));
      return null;
    });
    const { queries } = openConsole("/money");
    await screen.findByRole("group", { name: "Payments" });
    await screen.findByText("This month");
    const many = (path: string) => asked.filter((one) => one === path).length;
    expect([many("balance"), many("payments"), many("statements"), many("ledger")]).toEqual([1, 1, 1, 2]);
    asked.length = 0;
    answers("/api/v1/billing/ledger", () => Response.json({ items: [posting(0), ...mock.postings], next_page: "older" }));
    await act(() => queries.refetchQueries({ queryKey: ["spending"] }));
    expect(asked).toEqual(["ledger"]);
    const [read] = queries.getQueriesData<{ postings: { number: number }[] }>({ queryKey: ["spending"] });
    const numbers = read?.[1]?.postings.map(({ number }) => number) ?? [];
    expect(numbers.slice(0, 2)).toEqual([posting(0).number, posting(1).number]);
    expect(new Set(numbers).size).toBe(numbers.length);
  });
});

describe("a release", () => {
  it("says its consequences and the command first, and then is one request", async () => {
    openConsole(`/allocations/${allocation(1).id}`);
    await userEvent.click(await screen.findByRole("button", { name: "Release…" }));
    const dialog = within(await screen.findByRole("dialog"));
    expect(dialog.getByText(/All local data/)).toBeTruthy();
    expect(dialog.getByText(`gpuctl allocations release ${allocation(1).id}`)).toBeTruthy();
    expect(mock.sent).toHaveLength(0);
    await userEvent.click(dialog.getByRole("button", { name: "Release" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    expect(mock.sent.map(({ method, path }) => `${method} ${path}`)).toEqual([`POST /api/v1/allocations/${allocation(1).id}/release`]);
    expect(mock.sent[0]?.key).toMatch(/^[0-9a-f-]{36}$/);
  });
  it("that is refused leaves the dialog with what was typed", async () => {
    mock.overrides.push(({ method }) => (method === "POST" ? refusal(409, "state_conflict", "It is released already.") : null));
    openConsole(`/allocations/${allocation(1).id}`);
    await userEvent.click(await screen.findByRole("button", { name: "Release…" }));
    await userEvent.type(await screen.findByLabelText(/Was something wrong/), "slow disk");
    await userEvent.click(screen.getByRole("button", { name: "Release" }));
    expect(await screen.findByText(/It is released already/)).toBeTruthy();
    expect((screen.getByLabelText(/Was something wrong/) as HTMLInputElement).value).toBe("slow disk");
  });
});

describe("a secret that is shown once", () => {
  it("is in no address, storage or later page", async () => {
    openConsole("/service-accounts");
    await userEvent.click(await screen.findByRole("button", { name: "New key…" }));
    await userEvent.click(await screen.findByRole("button", { name: "New key" }));
    expect(await screen.findByText("shown-once-3f9a")).toBeTruthy();
    const stored = JSON.stringify({ ...sessionStorage }) + JSON.stringify({ ...localStorage }) + window.location.href;
    expect(stored).not.toContain("shown-once");
    await userEvent.click(screen.getByRole("button", { name: "Close" }));
    await waitFor(() => expect(document.body.textContent).not.toContain("shown-once"));
  });
});

describe("answers that are no data", () => {
  it("of a busy service are read again after Retry-After", async () => {
    const tooMany = new ApiFailure(429, "rate_limited", "Too many requests.", null, 7);
    expect(retryDelay(0, tooMany)).toBeGreaterThanOrEqual(7000);
    expect(retries(0, tooMany)).toBe(true);
    expect(retries(0, new ApiFailure(409, "state_conflict", "No.", null, null))).toBe(false);
    // With a stream, nothing is polled within a minute.
    vi.spyOn(eventStream, "current").mockReturnValue("live");
    let asked = 0;
    mock.overrides.push(({ url }) => (url.includes("/ssh-keys") && ++asked < 2 ? refusal(429, "rate_limited", "Too many requests.", { "Retry-After": "1" }) : null));
    openConsole("/ssh-keys");
    expect(await screen.findByText("laptop")).toBeTruthy();
    expect(asked).toBe(2);
  });
  it("that are refused are shown with their message and correlation id", async () => {
    mock.overrides.push(({ url }) => (url.includes("/service-accounts") ? refusal(403, "forbidden", "This needs another role.") : null));
    openConsole("/service-accounts");
    expect(await screen.findByText("This needs another role.")).toBeTruthy();
    expect(screen.getByText("0199e3f4-cafe")).toBeTruthy();
  });
  it("that were cut say so", async () => {
    mock.overrides.push(({ url }) => (url.includes("/ssh-keys") ? new Response('{"items":[', { headers: { "Content-Type": "application/json" } }) : null));
    openConsole("/ssh-keys");
    expect(await screen.findByText(/arrived in part/)).toBeTruthy();
  });
});

describe("the keyboard", () => {
  it("opens pages, the list of shortcuts and the palette", async () => {
    const { router } = openConsole("/");
    await screen.findByRole("heading", { level: 1, name: "Overview" });
    // Without a pause between the two, which a busy machine may make longer than the console waits.
    fireEvent.keyDown(document.body, { key: "g" });
    fireEvent.keyDown(document.body, { key: "m" });
    await screen.findByRole("heading", { level: 1, name: "Money" });
    expect(router.state.location.pathname).toBe("/money");
    await userEvent.keyboard("?");
    expect(await screen.findByRole("dialog", { name: "Keyboard shortcuts" })).toBeTruthy();
    await userEvent.keyboard("{Escape}");
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    await userEvent.keyboard("{Control>}k{/Control}");
    await userEvent.type(await screen.findByRole("combobox", { name: /Name of a page/ }), "catal{Enter}");
    await screen.findByRole("heading", { level: 1, name: "Catalog" });
    await waitFor(() => expect(document.activeElement?.tagName).toBe("H1"));
  });

  it("closes a dialog by Escape while nothing has the focus", async () => {
    openConsole("/");
    await screen.findByRole("heading", { level: 1, name: "Overview" });
    await userEvent.keyboard("?");
    await screen.findByRole("dialog", { name: "Keyboard shortcuts" });
    fireEvent.keyDown(document.body, { key: "Escape" });
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  });
});

describe("notifications", () => {
  const user = uuid(1);
  const messageAbout = (id: string, state: string, minutesAgo: number) => ({ id: `${id}-${state}`, type: `provisioning.${state}`, time: ago(minutesAgo), data: { allocation_id: id, state } });
  const rowsOf = async () => within((await screen.findByRole("heading", { name: "What happened" })).closest("section")!).getAllByRole("row").slice(1);

  it("that were received before a reload are still listed", async () => {
    openMessages(user);
    remember(messageAbout(allocation(1).id, "active", 3));
    // As a tab that is loaded again takes them up.
    openMessages(user);
    openConsole("/notifications");
    await screen.findByText("provisioning.active");
    expect(await rowsOf()).toHaveLength(1);
  });

  it("that no message brought are read out of the allocations, also of one that has ended", async () => {
    const [rented, ended] = [allocation(1), allocation(9, { state: "released" })];
    const history = (state: string, minutesAgo: number) => ({ state, reason: "by_hand", at: ago(minutesAgo) });
    mock.allocations = [
      { ...rented, status_history: [history("requested", 90), history("provisioning", 20), history("active", 19)] },
      { ...ended, status_history: [history("active", 90), history("released", 30)] },
    ];
    localStorage.setItem("gpuaas-notifications", JSON.stringify({ user, messages: [messageAbout(rented.id, "active", 19)], dismissed: [], connected_at: ago(60), rented: [rented.id, ended.id] }));
    openMessages(user);
    openConsole("/notifications");
    await waitFor(async () => expect(await rowsOf()).toHaveLength(3));
    const texts = (await rowsOf()).map((row) => row.textContent ?? "");
    expect(texts[0]).toContain("provisioning.active");
    expect(texts[1]).toMatch(/^provisioning: by hand.*read afterwards$/);
    expect(texts[2]).toMatch(/^released: by hand.*read afterwards$/);
  });

  it("of another user are not shown, and what the storage has is of no known form", async () => {
    for (const stored of [JSON.stringify({ user: uuid(2), messages: [messageAbout(allocation(1).id, "active", 3)], dismissed: [], connected_at: ago(60), rented: [] }), '{"user":7}', "{"]) {
      localStorage.setItem("gpuaas-notifications", stored);
      openMessages(user);
      const { unmount } = openConsole("/notifications");
      await screen.findByText("Nothing has happened since this browser was connected for the first time.");
      unmount();
    }
  });

  it("are stored with what is rented where that has changed, and not at every poll", () => {
    openMessages(user);
    const writes = vi.spyOn(Storage.prototype, "setItem");
    for (const ids of [[uuid(1)], [uuid(1)], [uuid(1), uuid(2)], [uuid(1), uuid(2)], []]) rememberRented(ids);
    expect(writes.mock.calls.map(([, text]) => (JSON.parse(text) as { rented: string[] }).rented)).toEqual([[uuid(1)], [uuid(1), uuid(2)], []]);
    writes.mockRestore();
  });

  it("are gone after a logout", async () => {
    openMessages(user);
    remember(messageAbout(allocation(1).id, "active", 3));
    expect(localStorage.getItem("gpuaas-notifications")).toContain("provisioning.active");
    await logOut();
    expect(localStorage.getItem("gpuaas-notifications")).toBeNull();
  });
});

describe("filters", () => {
  it("are in the address and in the request", async () => {
    const { router } = openConsole("/allocations?state=provisioning");
    await waitFor(() => expect(screen.queryByText("training-1")).toBeNull());
    expect(await screen.findByText(/devices reserved/)).toBeTruthy();
    await userEvent.selectOptions(screen.getByLabelText("State"), "release_failed");
    await screen.findByText("training-3");
    expect(router.state.location.search).toEqual({ state: "release_failed" });
  });
});

/** As the API lists: the oldest first, by pages. */
function paged<T>(items: readonly T[], query: URLSearchParams): Response {
  const from = Number(query.get("page_token") ?? 0);
  const until = from + Number(query.get("limit") ?? 50);
  return Response.json({ items: items.slice(from, until), next_page: until < items.length ? String(until) : null });
}

/** Answers GET requests of a path. */
function answers(path: string, answer: (query: URLSearchParams) => Response | Promise<Response>): void {
  mock.overrides.push(({ url, method }) => {
    const { pathname, searchParams } = new URL(url);
    return method === "GET" && pathname === path ? answer(searchParams) : null;
  });
}

describe("lists that begin with the oldest", () => {
  it("of allocations do not hide what runs behind what was released", async () => {
    mock.role = "operator";
    const all = [...Array.from({ length: 60 }, (_, index) => allocation(100 + index, { state: "released", user_id: "root" })), allocation(1, { name: "runs-now", user_id: "root" }), allocation(2, { name: "of-another" })];
    answers("/api/v1/allocations", (query) => {
      const matches = (value: string, name: string) => (query.get(name) ?? value) === value;
      return paged(all.filter(({ state, user_id }) => matches(state, "state") && matches(user_id, "user_id")), query);
    });
    openConsole("/");
    expect(await screen.findByText("runs-now")).toBeTruthy();
    expect(screen.queryByText("of-another")).toBeNull();
    expect(screen.queryByText(/Nothing is rented/)).toBeNull();
  });
  it("of payments show the newest first, and all of them", async () => {
    const all = Array.from({ length: 230 }, (_, index) => ({ ...payment, id: uuid(5000 + index), amount_minor: 100 * (index + 1), left_minor: 0, created_at: ago(9000 - index) }));
    answers("/api/v1/billing/payments", (query) => paged(all, query));
    openConsole("/money");
    const payments = within(await screen.findByRole("group", { name: "Payments" }));
    const amounts = () => payments.getAllByRole("row").slice(1).map((row) => row.querySelector("td")?.textContent?.replace(/[^\d.]/g, ""));
    expect(amounts()[0]).toBe("230.00");
    expect(amounts()).toHaveLength(20);
    await userEvent.click(screen.getByRole("button", { name: "Show more of Payments" }));
    expect(amounts()).toHaveLength(40);
  });
  it("of SSH keys offer the usable ones behind those that were revoked", async () => {
    const revoked = Array.from({ length: 220 }, (_, index) => ({ ...sshKey, id: uuid(6000 + index), name: `old-${index}`, is_default: false, revoked_at: ago(10) }));
    answers("/api/v1/ssh-keys", (query) => paged([...revoked, sshKey], query));
    openConsole("/rent?sku=h100-8");
    expect(await screen.findByRole("option", { name: /^laptop/ })).toBeTruthy();
    expect(screen.queryByText(/You have no SSH key/)).toBeNull();
  });
  it("of terminals show those that are open on a node behind those that were closed", async () => {
    mock.role = "admin";
    const closed = Array.from({ length: 1200 }, (_, index) => ({ ...terminal, id: uuid(7000 + index), state: "closed" as const }));
    const open = { ...terminal, user_id: "of-this-moment", node_id: node(1).id };
    answers("/api/v1/admin/terminal-sessions", (query) => paged([...closed, open].filter(({ state }) => (query.get("state") ?? state) === state), query));
    openConsole(`/nodes/${node(1).id}`);
    expect(await screen.findByText("of-this-moment")).toBeTruthy();
  });
  it("whose page is refused lead back to the first page", async () => {
    answers("/api/v1/allocations", (query) => (query.get("page_token") === "old" ? refusal(400, "invalid_request", "Query parameter `page_token` is not of this list.") : paged([allocation(1)], query)));
    const { router } = openConsole("/allocations?page=old");
    await screen.findByText(/is not of this list/);
    await userEvent.click(screen.getByRole("button", { name: "First page" }));
    expect(await screen.findByText("training-1")).toBeTruthy();
    expect(router.state.location.search).toEqual({});
  });
});

describe("what a page is for, and its caller may not do,", () => {
  /** An administrator without some of what the fixtures give. */
  const mayNot = (...missing: string[]) => {
    mock.role = "operator";
    const all = me("operator");
    answers("/api/v1/me", () => Response.json({ ...all, permissions: all.permissions.filter((one) => !missing.includes(one)) }));
  };
  it.each([
    ["/payment-events", "To retry or dismiss an event you need the role billing_operations.", "Retry…"],
    [`/accounts/${uuid(1)}`, "To credit or debit this account you need the role billing_operations.", "Adjust…"],
    [`/allocations/${allocation(3).id}`, "To retry the release you need the role admin.", "Retry the release…"],
    ["/stuck", "To retry or force the release you need the role admin.", "Force the release…"],
  ])("is named on %s with its role", async (address, sentence, button) => {
    mayNot("settle_processor_events", "adjust_billing", "rescue_allocations");
    openConsole(address);
    expect(await screen.findByText(sentence)).toBeTruthy();
    expect(screen.queryByRole("button", { name: button })).toBeNull();
    cleanup();
    mock.overrides.length = 0;
    openConsole(address);
    expect(await screen.findByRole("button", { name: button })).toBeTruthy();
    expect(screen.queryByText(sentence)).toBeNull();
  });
});

describe("what is opened and ordered on a page", () => {
  const search = (router: { state: { location: { search: unknown } } }) => router.state.location.search;
  const firstCells = (table: string) => within(screen.getByRole("group", { name: table })).getAllByRole("row").slice(1).map((row) => row.querySelector("td")?.textContent);
  it("is the month of a statement, in the address, and the ledger stays at its page", async () => {
    const { router } = openConsole("/money?page=60");
    await userEvent.click(await screen.findByRole("button", { name: "Show the lines of 2026-10" }));
    expect(await screen.findByRole("group", { name: "Lines of 2026-10" })).toBeTruthy();
    expect(search(router)).toEqual({ page: "60", month: "2026-10" });
    await userEvent.click(screen.getByRole("button", { name: "Hide the lines of 2026-10" }));
    await waitFor(() => expect(search(router)).toEqual({ page: "60" }));
    await waitFor(() => expect(screen.queryByRole("group", { name: "Lines of 2026-10" })).toBeNull());
  });
  it("is the month of the address, where it has a statement", async () => {
    mock.role = "admin";
    openConsole(`/accounts/${uuid(1)}?month=2026-10`);
    expect(await screen.findByRole("group", { name: "Lines of 2026-10" })).toBeTruthy();
    cleanup();
    const asked: string[] = [];
    mock.overrides.push(({ url }) => {
      asked.push(new URL(url).pathname);
      return null;
    });
    openConsole("/money?month=1999-01");
    await screen.findByRole("button", { name: "Show the lines of 2026-10" });
    expect(asked.filter((path) => path.includes("1999-01"))).toEqual([]);
  });
  it("is the caller for whom a policy is resolved, in the address", async () => {
    mock.role = "admin";
    const { router } = openConsole("/policies?key=allocation.max_concurrent_per_user");
    await screen.findByText("the default: nothing is written");
    await userEvent.type(screen.getByLabelText("user_id"), "ann{Enter}");
    await waitFor(() => expect(search(router)).toEqual({ key: "allocation.max_concurrent_per_user", user_id: "ann" }));
    await waitFor(() => expect(screen.queryByText("the default: nothing is written")).toBeNull());
    cleanup();
    openConsole("/policies?key=allocation.max_concurrent_per_user&user_id=ann");
    expect(((await screen.findByLabelText("user_id")) as HTMLInputElement).value).toBe("ann");
    const resolved = within(screen.getByRole("region", { name: "What holds for a caller" }));
    expect(await resolved.findByText("user_id=ann")).toBeTruthy();
  });
  it("is a text, also where the address has a number", async () => {
    mock.role = "admin";
    const { router } = openConsole("/policies?key=allocation.max_concurrent_per_user&user_id=42");
    await screen.findByText("user_id=ann");
    await userEvent.click(screen.getByRole("button", { name: "Apply" }));
    await waitFor(() => expect(search(router)).toEqual({ key: "allocation.max_concurrent_per_user", user_id: "42" }));
    cleanup();
    openConsole("/operations?sort=7");
    expect(await screen.findByRole("columnheader", { name: "Silent for" })).toBeTruthy();
  });
  it("is the column that members are sorted by, by the keyboard and in the address", async () => {
    mock.role = "operator";
    const member = (name: string, silent_for_ms: number, clock_offset_ms: number | null) => ({ id: name, name, roles: ["api"], shards: [], silent_for_ms, clock_offset_ms, started_at: ago(9) });
    answers("/api/v1/admin/runtime/cluster", () =>
      Response.json({ answered_by: "a", incarnation: 1, unowned_shards: 0, members: [member("replica-1", 90, 4), member("replica-2", 1500, null), member("replica-3", 200, -2)] }),
    );
    const { router } = openConsole("/operations");
    const head = await screen.findByRole("columnheader", { name: "Silent for" });
    for (const order of [
      [{ sort: "silent-for" }, "ascending", ["replica-1", "replica-3", "replica-2"]],
      [{ sort: "-silent-for" }, "descending", ["replica-2", "replica-3", "replica-1"]],
      [{}, null, ["replica-1", "replica-2", "replica-3"]],
    ]) {
      const button = within(head).getByRole("button");
      act(() => button.focus());
      await userEvent.keyboard("{Enter}");
      await waitFor(() => expect([search(router), head.getAttribute("aria-sort"), firstCells("Members")]).toEqual(order));
      expect(document.activeElement).toBe(button);
    }
    cleanup();
    openConsole("/operations?sort=-clock-offset");
    expect((await screen.findByRole("columnheader", { name: "Clock offset" })).getAttribute("aria-sort")).toBe("descending");
    expect(firstCells("Members")).toEqual(["replica-1", "replica-3", "replica-2"]);
  });
  it("is the order of offers and of the nodes of the map", async () => {
    tallWindow();
    mock.role = "admin";
    const offer = (number: number, name: string, amount_minor_per_gpu_hour: number) => ({ ...sku, id: uuid(10 + number), name, price: { currency: "EUR", amount_minor_per_gpu_hour } });
    answers("/api/v1/skus", () => Response.json({ items: [offer(0, "h100-8", 250), offer(1, "b200-8", 480), offer(2, "l4-1", 40)], next_page: null }));
    const { router } = openConsole("/catalog");
    const names = () => screen.getAllByRole("heading", { level: 2 }).map(({ textContent }) => textContent).filter((name) => /-\d$/.test(name ?? ""));
    await userEvent.selectOptions(await screen.findByLabelText("Order"), "price");
    await waitFor(() => expect(names()).toEqual(["l4-1", "h100-8", "b200-8"]));
    expect(search(router)).toEqual({ sort: "price" });
    cleanup();
    openConsole("/gpus?sort=-free");
    const rows = await screen.findAllByRole("list", { name: /^GPUs of/ });
    expect(rows.map((row) => row.getAttribute("aria-label"))).toEqual(["GPUs of rack-1", "GPUs of rack-0", "GPUs of rack-2"]);
  });
  it("is the column of stuck entities, of which the first of the order are shown", async () => {
    mock.role = "operator";
    const all = Array.from({ length: 103 }, (_, index) => ({ ...entity, id: uuid(8000 + index), since: ago(index) }));
    answers("/api/v1/admin/runtime/tree", (query) => Response.json(tree(query.get("parked") ? [] : all)));
    openConsole("/stuck?sort=since");
    await screen.findByRole("region", { name: /^103 × allocation/ });
    const links = within(screen.getByRole("group", { name: "Entities" })).getAllByRole("link").map((link) => link.getAttribute("href"));
    expect(links[0]).toBe(`/console/entities/allocation/${uuid(8102)}`);
  });
});

describe("the age of a view", () => {
  it.each([
    ["/catalog", "main"],
    ["/rent?sku=h100-8", "aside"],
    [`/allocations/${allocation(1).id}`, "section:has([aria-label='GPUs'])"],
    ["/audit", "main"],
    ["/operations", "section:has([aria-label='Members'])"],
  ])("of %s says that it is not live: no message reports what it shows", async (address, view) => {
    mock.role = "admin";
    vi.spyOn(eventStream, "current").mockReturnValue("live");
    openConsole(address);
    const ageOf = () => document.querySelector(view)?.querySelector(".age")?.textContent;
    await waitFor(() => expect(ageOf()).toMatch(/^As of /));
    expect(ageOf()).not.toContain("live");
    cleanup();
    openConsole("/ssh-keys");
    await waitFor(() => expect(document.querySelector("main .age")?.textContent).toMatch(/^As of .* · live/));
  });
});

describe("the allocation of another user", () => {
  it("offers an administrator no terminal, and the end of one with a reason", async () => {
    mock.role = "admin";
    openConsole(`/allocations/${allocation(1).id}`);
    await userEvent.click(await screen.findByRole("button", { name: "End…" }));
    const dialog = within(await screen.findByRole("dialog"));
    expect(dialog.getByText(/^gpuctl terminal sessions kill/)).toBeTruthy();
    expect(dialog.getByLabelText("Reason")).toBeTruthy();
    expect(screen.queryByText("Open a terminal")).toBeNull();
  });
});

describe("the deletion of the default SSH key", () => {
  it("names the key that takes its place, the oldest other one", async () => {
    const keys = [
      { ...sshKey, id: "0198f000-0000-7000-8000-0000000000a1", name: "oldest", is_default: false },
      { ...sshKey, id: "0198f000-0000-7000-8000-0000000000a2", name: "newer", is_default: false },
      { ...sshKey, id: "0198f000-0000-7000-8000-0000000000a3", name: "laptop", is_default: true },
    ];
    answers("/api/v1/ssh-keys", (query) => paged(keys, query));
    openConsole("/ssh-keys");
    const row = within((await screen.findByText("laptop")).closest("tr")!);
    await userEvent.click(row.getByRole("button", { name: "Delete…" }));
    const dialog = await screen.findByRole("dialog");
    expect(dialog.textContent).toContain("It is the default key. oldest (");
    expect(dialog.textContent).toContain("becomes the default");
  });
});

describe("a policy's form", () => {
  it("opens once the values are read that it is compared with", async () => {
    mock.role = "admin";
    let release: () => void = () => {};
    const gate = new Promise<void>((opened) => (release = opened));
    answers("/api/v1/admin/policy-values", async (query) => {
      await gate;
      return paged([], query);
    });
    openConsole("/policies?key=allocation.max_concurrent_per_user");
    await screen.findByText(/How many allocations a user may have/);
    expect(screen.queryByRole("button", { name: "Set a value…" })).toBeNull();
    release();
    expect(await screen.findByRole("button", { name: "Set a value…" })).toBeTruthy();
  });
});

describe("the keys of an allocation", () => {
  it("are chosen once those of its user are read", async () => {
    let release: () => void = () => {};
    const gate = new Promise<void>((opened) => (release = opened));
    answers("/api/v1/ssh-keys", async (query) => {
      await gate;
      return paged([sshKey], query);
    });
    openConsole(`/allocations/${allocation(1).id}`);
    await screen.findByRole("button", { name: "Release…" });
    expect(screen.queryByRole("button", { name: "SSH keys…" })).toBeNull();
    release();
    expect(await screen.findByRole("button", { name: "SSH keys…" })).toBeTruthy();
  });
});

describe("a receiver of notifications", () => {
  it("is no e-mail where the login has no verified address", async () => {
    openConsole("/notifications");
    await userEvent.click(await screen.findByRole("button", { name: "Add…" }));
    const kind = (await screen.findByLabelText("Kind")) as HTMLSelectElement;
    expect([...kind.options].map(({ value }) => value)).toEqual(["webhook"]);
    expect(screen.getByText(/needs an address that your identity provider has verified/)).toBeTruthy();
  });
});

describe("a user whose roles were all taken back", () => {
  it("reads why nothing is shown, and can log out", async () => {
    answers("/api/v1/me", () => refusal(403, "forbidden", "Your account has neither the role `user` nor `admin`; ask an administrator for one."));
    openConsole("/");
    expect(await screen.findByText(/neither the role/)).toBeTruthy();
    await userEvent.click(screen.getByRole("button", { name: "Log out" }));
    await waitFor(() => expect(mock.sent.map(({ path }) => path)).toEqual(["/console/logout"]));
  });
});
