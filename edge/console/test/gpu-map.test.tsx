// The map of GPUs and the tree, with more rows than fit on the screen.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { act, fireEvent, screen, waitFor } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import type { Schemas } from "../src/api/client.ts";
import { eventStream } from "../src/live/browser.ts";
import { allocation, entity, node, tree, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";
import { refusal } from "./mock-api.ts";
import { ROW, rowNumbers, SCREEN, scrollTo, tallWindow } from "./tall-window.ts";

const MANY = 10_000;
const LIMIT = 200;

const nodeAt = (index: number): Schemas["Node"] => ({ ...node(1), id: uuid(100_000 + index), name: `rack-${index}`, gpu_resets: [], health: { status: "ok", alerts: [], findings: [] } });
const all = Array.from({ length: MANY }, (_, index) => nodeAt(index));

/** How often a page of nodes was asked for. */
let asked = 0;

/** The API has this many nodes. */
function fleetOf(many: number): void {
  mock.overrides.push(({ url }) => {
    const { pathname, searchParams } = new URL(url);
    if (pathname !== "/api/v1/admin/nodes") return null;
    asked += 1;
    const from = Number(searchParams.get("page_token") ?? 0);
    const until = Math.min(from + Number(searchParams.get("limit") ?? 50), many);
    return Response.json({ items: all.slice(from, until), next_page: until < many ? String(until) : null });
  });
}

/** The link of a node's row, where it is drawn. A query by role reads the names of all GPUs, which takes long. */
const linkOf = (place: number) => [...document.querySelectorAll<HTMLElement>(".gpu-node a")].find(({ textContent }) => textContent === `rack-${place}`);
const drawn = (place: number) =>
  waitFor(() => {
    const link = linkOf(place);
    if (!link) throw new Error(`rack-${place} is not drawn`);
    return link;
  });

beforeEach(() => {
  tallWindow();
  mock.role = "admin";
  // With a stream, nothing is polled within a minute: requests are counted.
  vi.spyOn(eventStream, "current").mockReturnValue("live");
  asked = 0;
});
afterEach(() => {
  vi.useRealTimers();
});

describe("the map of GPUs", () => {
  it("of 10,000 nodes draws the rows on screen alone, with their place among all", async () => {
    fleetOf(LIMIT);
    const { queries } = openConsole("/gpus");
    await screen.findByLabelText("Nodes");
    const pages = Array.from({ length: MANY / LIMIT }, (_, page) => ({ items: all.slice(page * LIMIT, (page + 1) * LIMIT), next_page: null }));
    act(() => void queries.setQueryData(["gpu-map", undefined, undefined], { pages, pageParams: pages.map((_, page) => String(page)) }));
    const table = screen.getByLabelText("Nodes");
    await waitFor(() => expect(table.getAttribute("aria-rowcount")).toBe(String(MANY + 1)));
    expect(screen.getByText(new Intl.NumberFormat().format(2 * MANY), { selector: "strong" }).parentElement?.textContent).toContain("held by an allocation");
    for (const place of [0, 5000, MANY - 20]) {
      scrollTo(table, place * ROW);
      const rows = rowNumbers(table);
      expect(rows.length).toBeGreaterThan(13);
      expect(rows.length).toBeLessThan(60);
      expect(rows).toContain(place + 2);
      expect(linkOf(place)).toBeTruthy();
      expect(document.querySelectorAll("main *").length).toBeLessThan(3000);
    }
  });

  it("reads on where it is scrolled to its end, and says that there are more", async () => {
    fleetOf(450);
    openConsole("/gpus");
    const table = await screen.findByLabelText("Nodes");
    expect(await screen.findByText("200 nodes are shown, counted and ordered; there are more.")).toBeTruthy();
    // Not known: -1, as ARIA has it.
    expect(table.getAttribute("aria-rowcount")).toBe("-1");
    expect(asked).toBe(1);
    scrollTo(table, 195 * ROW);
    expect(await screen.findByText("400 nodes are shown, counted and ordered; there are more.")).toBeTruthy();
    expect(asked).toBe(2);
    await userEvent.click(screen.getByText("Show more nodes"));
    await waitFor(() => expect(table.getAttribute("aria-rowcount")).toBe("451"));
    expect(screen.queryByText(/there are more/)).toBeNull();
    expect(asked).toBe(3);
  });

  it("goes on by its button where a page could not be read", async () => {
    let isDown = true;
    mock.overrides.push(({ url }) => (isDown && url.includes("page_token") ? refusal(500, "internal", "The store does not answer.") : null));
    fleetOf(450);
    openConsole("/gpus");
    const table = await screen.findByLabelText("Nodes");
    scrollTo(table, 195 * ROW);
    expect(await screen.findByText("The store does not answer.")).toBeTruthy();
    expect(screen.getByText("200 nodes are shown, counted and ordered; there are more.")).toBeTruthy();
    isDown = false;
    await userEvent.click(screen.getByText("Show more nodes"));
    expect(await screen.findByText("400 nodes are shown, counted and ordered; there are more.")).toBeTruthy();
  });

  it("of more than 1,000 nodes says that it is not read again by itself, and is on request", async () => {
    fleetOf(1200);
    const { queries } = openConsole("/gpus");
    await screen.findByText("200 nodes are shown, counted and ordered; there are more.");
    await act(() => queries.invalidateQueries({ queryKey: ["gpu-map"] }));
    expect(asked).toBe(2);
    const pages = Array.from({ length: 6 }, (_, page) => ({ items: all.slice(page * LIMIT, (page + 1) * LIMIT), next_page: page < 5 ? String((page + 1) * LIMIT) : null }));
    act(() => void queries.setQueryData(["gpu-map", undefined, undefined], { pages, pageParams: pages.map((_, page) => (page === 0 ? "" : String(page * LIMIT))) }));
    expect(await screen.findByText(/are not read again by themselves/)).toBeTruthy();
    await act(() => queries.invalidateQueries({ queryKey: ["gpu-map"] }));
    expect(asked).toBe(2);
    await userEvent.click(screen.getByLabelText("Read again"));
    await waitFor(() => expect(asked).toBe(8));
  });

  it("keeps the row that has the focus, wherever it is scrolled to", async () => {
    fleetOf(LIMIT);
    openConsole("/gpus");
    const link = await drawn(3);
    const table = screen.getByLabelText("Nodes");
    act(() => link.focus());
    scrollTo(table, 150 * ROW);
    await drawn(150);
    expect(document.activeElement).toBe(link);
    expect(link.isConnected).toBe(true);
    expect(linkOf(4)).toBeUndefined();
    act(() => link.blur());
    await waitFor(() => expect(link.isConnected).toBe(false));
  });

  it("reaches each node by the keyboard: the next row is drawn before the focus gets there", async () => {
    fleetOf(LIMIT);
    openConsole("/gpus");
    await drawn(0);
    const table = screen.getByLabelText("Nodes");
    for (let place = 0; place < 35; place += 1) {
      const link = linkOf(place);
      act(() => link?.focus());
      expect(document.activeElement?.textContent).toBe(`rack-${place}`);
      // As a browser does where the focus leaves the screen.
      scrollTo(table, Math.max(0, (place + 1) * ROW - SCREEN));
    }
  });

  it("says who holds a GPU that has the focus, or at which a pointer stays, by one request for each", async () => {
    const [first, second] = [allocation(1, { user_id: "<b>eve</b>", name: "finetune" }), allocation(2, { user_id: "ann" })];
    const fixture = node(1);
    const gpus = fixture.inventory?.gpus.map((gpu) => ({ ...gpu, allocation_id: [first, second][gpu.index]?.id ?? null })) ?? [];
    const asked: string[] = [];
    mock.overrides.push(({ url }) => {
      const { pathname } = new URL(url);
      if (pathname === "/api/v1/admin/nodes") return Response.json({ items: [{ ...fixture, inventory: { ...fixture.inventory, gpus } }], next_page: null });
      const found = [first, second].find(({ id }) => pathname === `/api/v1/allocations/${id}`);
      if (found) asked.push(found.id);
      return found ? Response.json(found) : null;
    });
    openConsole("/gpus");
    const status = (await screen.findByText(/Point at a held GPU/)).closest("[role=status]");
    const [one, other] = await waitFor(() => screen.getAllByLabelText(/held by an allocation/));
    // A pointer that only crosses a GPU asks for nothing.
    vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout"] });
    fireEvent.mouseOver(other as HTMLElement);
    act(() => void vi.advanceTimersByTime(150));
    fireEvent.mouseOver(one as HTMLElement);
    act(() => void vi.advanceTimersByTime(250));
    vi.useRealTimers();
    await waitFor(() => expect(status?.textContent).toContain("GPU 0 of rack-1 is held by <b>eve</b>: allocation finetune"));
    expect(asked).toEqual([first.id]);
    act(() => other?.focus());
    await waitFor(() => expect(status?.textContent).toContain("GPU 1 of rack-1 is held by ann"));
    expect(asked).toEqual([first.id, second.id]);
  });
});

describe("the tree", () => {
  it("draws the rows on screen alone, with their place among all", async () => {
    const entities = Array.from({ length: 1000 }, (_, index) => ({ ...entity, id: uuid(200_000 + index) }));
    mock.overrides.push(({ url }) => (url.includes("/admin/runtime/tree") ? Response.json(tree(entities)) : null));
    openConsole("/tree");
    const table = await screen.findByLabelText("Entities", { selector: "[role=table]" });
    await waitFor(() => expect(rowNumbers(table)).toContain(2));
    expect(rowNumbers(table).length).toBeLessThan(60);
    expect(table.getAttribute("aria-rowcount")).toBe("1001");
    scrollTo(table, 34 * 990);
    await waitFor(() => expect(rowNumbers(table)).toContain(1001));
  });
});
