// What is in the address of a page: filters, pages of lists, orders.
import { describe, expect, it } from "vitest";
import { act, cleanup, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { answers, paged } from "./answers.ts";
import { ago, allocation, entity, node, payment, recording, sku, sshKey, terminal, tree, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";
import { refusal } from "./mock-api.ts";
import { tallWindow } from "./tall-window.ts";

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

describe("what is typed into a filter", () => {
  it("stays where another filter is chosen, and is applied with the next press", async () => {
    const { router } = openConsole("/allocations");
    await screen.findByText("training-1");
    await userEvent.type(screen.getByLabelText("Name"), "train");
    await userEvent.selectOptions(screen.getByLabelText("State"), "active");
    await waitFor(() => expect(router.state.location.search).toEqual({ state: "active" }));
    expect(screen.getByLabelText<HTMLInputElement>("Name").value).toBe("train");
    await userEvent.click(screen.getByRole("button", { name: "Apply" }));
    await waitFor(() => expect(router.state.location.search).toEqual({ state: "active", name: "train" }));
    await userEvent.click(screen.getByRole("button", { name: "Clear" }));
    await waitFor(() => expect(screen.getByLabelText<HTMLInputElement>("Name").value).toBe(""));
  });
});

describe("the rows of the filter before", () => {
  it("stay while those that were asked for are on the way, and are not shown as these", async () => {
    let arrive = () => {};
    mock.overrides.push(async ({ url }) => {
      const { pathname, searchParams } = new URL(url);
      if (pathname === "/api/v1/allocations" && searchParams.get("state") === "released") await new Promise<void>((done) => (arrive = done));
      return null;
    });
    openConsole("/allocations");
    await screen.findByText("training-1");
    expect(document.querySelector("main .loading")).toBeNull();
    await userEvent.selectOptions(screen.getByLabelText("State"), "released");
    expect(await screen.findByText("Loading…")).toBeTruthy();
    expect(screen.getByText("training-1")).toBeTruthy();
    arrive();
    await screen.findByText("Nothing matches the filter. Clear it to see all.");
    expect(document.querySelector("main .loading")).toBeNull();
  });
});

describe("lists that grow with time", () => {
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
  it.each([
    ["/money", "/api/v1/billing/payments", "user"],
    [`/accounts/${uuid(1)}`, `/api/v1/admin/billing/accounts/${uuid(1)}/payments`, "admin"],
  ] as const)("of 1,230 payments on %s show the newest first, by pages of one request", async (address, path, role) => {
    mock.role = role;
    const all = Array.from({ length: 1230 }, (_, index) => ({ ...payment, id: uuid(5000 + index), amount_minor: 100 * (index + 1), left_minor: 0, created_at: ago(9000 - index) }));
    let asked = 0;
    answers(path, (query) => {
      asked += 1;
      return paged(all, query);
    });
    const { router } = openConsole(address);
    const amounts = () => within(screen.getByRole("group", { name: "Payments" })).getAllByRole("row").slice(1).map((row) => row.querySelector("td")?.textContent?.replace(/[^\d.]/g, ""));
    await screen.findByRole("group", { name: "Payments" });
    expect([amounts()[0], amounts().length, asked]).toEqual(["1230.00", 20, 1]);
    await userEvent.click(within(screen.getByRole("navigation", { name: "Pages of Payments" })).getByRole("button", { name: "Next page" }));
    await waitFor(() => expect(amounts()[0]).toBe("1210.00"));
    expect([asked, router.state.location.search]).toEqual([2, { payments_page: "20" }]);
  });
  it("of 1,230 recordings show the newest first", async () => {
    const all = Array.from({ length: 1230 }, (_, index) => ({ ...recording, id: uuid(5000 + index), duration_ms: 1000 * (index + 1) }));
    answers(`/api/v1/allocations/${allocation(1).id}/recordings`, (query) => paged(all, query));
    openConsole(`/allocations/${allocation(1).id}`);
    const [, newest] = within(await screen.findByRole("group", { name: "Terminal recordings" })).getAllByRole("row");
    expect(newest?.textContent).toContain("1,230 s");
  });
  it.each([
    ["/allocations", "/api/v1/allocations", "Allocations"],
    ["/terminals", "/api/v1/admin/terminal-sessions", "Terminals"],
    ["/terminals", "/api/v1/admin/recordings", "Recordings"],
    ["/logins", "/api/v1/admin/browser-sessions", "Logins"],
    ["/rollouts", "/api/v1/admin/rollouts", "Rollouts"],
    ["/payment-events", "/api/v1/admin/billing/processor-events", "Payment events"],
  ])("on %s are asked for from the newest on: %s", async (address, path, label) => {
    mock.role = "admin";
    const orders: (string | null)[] = [];
    mock.overrides.push(({ url, method }) => {
      const { pathname, searchParams } = new URL(url);
      if (method === "GET" && pathname === path) orders.push(searchParams.get("order"));
      return null;
    });
    openConsole(address);
    await screen.findByRole("group", { name: label });
    expect(orders).toEqual(["newest_first"]);
  });
  it("begin with the oldest at a replica of an earlier release, which refuses the order", async () => {
    answers("/api/v1/allocations", (query) =>
      query.has("order") ? refusal(400, "invalid_request", "Query parameter `order` is not known here; leave it out.", {}, { field: "order" }) : paged([allocation(1)], query),
    );
    openConsole("/allocations");
    expect(await screen.findByText("training-1")).toBeTruthy();
  });
  it("keep that order while the service is upgraded, and begin with the newest afterwards", async () => {
    mock.role = "admin";
    let isEarlier = true;
    const orders: (string | null)[] = [];
    answers("/api/v1/allocations", (query) => {
      orders.push(query.get("order"));
      return isEarlier && query.has("order") ? refusal(400, "invalid_request", "Query parameter `order` is not known here; leave it out.", {}, { field: "order" }) : paged([allocation(1)], query);
    });
    const { queries } = openConsole("/allocations");
    await screen.findByText("training-1");
    isEarlier = false;
    await act(() => queries.refetchQueries({ queryKey: ["allocations"] }));
    expect(orders).toEqual(["newest_first", null, null]);
    sessionStorage.setItem("gpuaas-order-refused-at", String(Date.now() - 16 * 60_000));
    await act(() => queries.refetchQueries({ queryKey: ["allocations"] }));
    expect(orders.at(-1)).toBe("newest_first");
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
