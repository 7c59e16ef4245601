// The steps of a new user, from nothing to a shell.
import { beforeEach, describe, expect, it, vi } from "vitest";
import { screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { eventStream } from "../src/live/browser.ts";
import { Refresher } from "../src/live/refresh.ts";
import { firstAllocation } from "../src/pages/first-steps.tsx";
import { allocation, balance, me, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

const PENNILESS = { ...balance, balance_minor: 0, balance_micro: 0, available_minor: 0, burn_minor_per_hour: 0, running: 0, lasts_until: null };
const PROVISIONING = allocation(1, { state: "provisioning", state_reason: "devices_reserved", active_at: null, ssh: null, deadline_at: new Date(Date.now() + 240_000).toISOString() });

const steps = async () => within(await screen.findByRole("list", { name: "First steps" })).getAllByRole("listitem");
const current = (items: HTMLElement[]) => items.find((item) => item.getAttribute("aria-current") === "step") as HTMLElement;

beforeEach(() => {
  mock.allocations = [];
  mock.balance = PENNILESS;
});

describe("the first steps of a new user", () => {
  it("are four, of which the next one alone has a button", async () => {
    openConsole("/");
    const items = await steps();
    expect(items).toHaveLength(4);
    expect(items.flatMap((item) => within(item).queryAllByRole("link")).map(({ textContent }) => textContent)).toEqual(["Top up"]);
    expect(within(current(items)).getByRole("link", { name: "Top up" }).getAttribute("href")).toBe("/console/money");
  });

  it("go on with the catalog once the balance is paid in, on the page to which the payment leads back", async () => {
    mock.balance = balance;
    openConsole("/money");
    const items = await steps();
    expect(items[0]?.textContent).toContain("done");
    expect(within(current(items)).getByRole("link", { name: "Open the catalog" }).getAttribute("href")).toBe("/console/catalog");
  });

  it("say what the first allocation waits for, and until when", async () => {
    mock.allocations = [PROVISIONING];
    openConsole("/");
    const step = current(await steps());
    expect(step.textContent).toMatch(/devices reserved.*deadline in 4 minutes/);
    expect(within(step).getByRole("link").getAttribute("href")).toBe(`/console/allocations/${PROVISIONING.id}`);
  });

  it("follow the stream: the terminal is offered when the allocation has become active", async () => {
    mock.allocations = [PROVISIONING];
    const { queries } = openConsole("/");
    expect(current(await steps()).textContent).toContain("Wait until");
    mock.allocations = [allocation(1)];
    new Refresher(queries).onEvent({ kind: "message", message: { id: "m", type: "provisioning.active", time: "", data: { allocation_id: PROVISIONING.id } } });
    const link = await screen.findByRole("link", { name: "Open a terminal" });
    expect(link.getAttribute("href")).toBe(`/terminal/${uuid(101)}`);
  });

  it("are gone once a terminal was opened, also after a reload", async () => {
    mock.allocations = [allocation(1)];
    const { unmount } = openConsole("/");
    const link = await screen.findByRole("link", { name: "Open a terminal" });
    link.addEventListener("click", (event) => event.preventDefault());
    await userEvent.click(link);
    await waitFor(() => expect(screen.queryByRole("region", { name: "First steps" })).toBeNull());
    unmount();
    const { queries } = openConsole("/");
    await screen.findByRole("group", { name: "Allocations" });
    await waitFor(() => expect(queries.isFetching()).toBe(0));
    expect(screen.queryByRole("region", { name: "First steps" })).toBeNull();
  });

  it("can be hidden by a user of SSH", async () => {
    mock.allocations = [allocation(1)];
    openConsole("/");
    await userEvent.click(await screen.findByRole("button", { name: "Hide" }));
    expect(screen.queryByRole("region", { name: "First steps" })).toBeNull();
  });

  it("have the reason of a request that failed", async () => {
    mock.balance = balance;
    const failure = { phase: "placement", code: "no_capacity", message: "No node has two free GPUs.", retryable: false };
    mock.allocations = [allocation(1, { state: "released", active_at: null, failure })];
    openConsole("/");
    expect(current(await steps()).textContent).toContain("The last request has failed: No node has two free GPUs.");
  });

  it("name the role where the caller may not pay, and offer the SSH command where it may open no terminal", async () => {
    let permissions = ["rent"];
    mock.overrides.push(({ url }) => (new URL(url).pathname === "/api/v1/me" ? Response.json({ ...me("user"), permissions }) : null));
    const { unmount } = openConsole("/");
    expect(current(await steps()).textContent).toContain("you need the role user or admin");
    unmount();
    permissions = ["rent", "pay"];
    mock.allocations = [allocation(1)];
    openConsole("/");
    expect(within(current(await steps())).getByRole("link").textContent).toBe("See the SSH command");
  });
});

describe("a user who is not new", () => {
  it("sees no steps, and their list is read once", async () => {
    vi.spyOn(eventStream, "current").mockReturnValue("live");
    mock.balance = balance;
    mock.allocations = [allocation(1, { state: "released" })];
    let asked = 0;
    mock.overrides.push(({ url }) => {
      if (new URL(url).searchParams.get("limit") === "5") asked += 1;
      return null;
    });
    const { queries } = openConsole("/");
    await screen.findByText("Nothing is rented.", { exact: false });
    await waitFor(() => expect(asked).toBe(1));
    await queries.invalidateQueries({ queryKey: ["allocations"] });
    await waitFor(() => expect(queries.isFetching()).toBe(0));
    expect(asked).toBe(1);
    expect(screen.queryByRole("region", { name: "First steps" })).toBeNull();
  });

  it.each([
    ["whose allocation has run and ended", [allocation(1, { state: "released" })], null],
    ["who has two allocations", [allocation(1), allocation(2)], null],
    ["who has more than are read", [], "more"],
  ])("is one %s", (_, items, next_page) => {
    expect(firstAllocation({ items, next_page })).toBe("not-new");
  });
});
