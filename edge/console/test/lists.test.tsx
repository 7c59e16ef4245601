// The list of each page: without an item, and of 10,000.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { cleanup, waitFor } from "@testing-library/react";
import { NAVIGATION } from "../src/layout/navigation.ts";
import { uuid, type Role } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";
import { tallWindow } from "./tall-window.ts";

type Item = Record<string, unknown>;
type Body = Item & { next_page?: string | null };

/** The arrays of an answer that are lists: what the caller may do is none, nor what a set consists of. */
const LISTS = ["items", "entities", "gpus", "money", "members", "sets", "replicas", "overrides"] as const;

/** Changes each list of the usual answers. Counts the requests by their path. */
function lists(change: (body: Body, query: URLSearchParams) => Body): Map<string, number> {
  const asked = new Map<string, number>();
  mock.overrides.push(async ({ url, method }) => {
    const at = new URL(url);
    if (method !== "GET" || !at.pathname.startsWith("/api/")) return null;
    asked.set(at.pathname, (asked.get(at.pathname) ?? 0) + 1);
    const usual = mock.read(at);
    if (at.pathname === "/api/v1/me" || !usual.ok) return usual;
    return Response.json(change((await usual.json()) as Body, at.searchParams));
  });
  return asked;
}

function emptied(body: Body): Body {
  const none = LISTS.filter((name) => Array.isArray(body[name])).map((name) => [name, []]);
  return { ...body, ...Object.fromEntries(none), ...("entities_by_kind" in body ? { entities_by_kind: {} } : {}), ...("next_page" in body ? { next_page: null } : {}) };
}

const MANY = 10_000;

/** As the API pages: 50 items, or as many as were asked for. */
function long(body: Body, query: URLSearchParams): Body {
  const name = LISTS.find((list) => Array.isArray(body[list]));
  const [first] = name ? (body[name] as Item[]) : [];
  if (!name || !first || !("next_page" in body)) return body;
  const from = Number(query.get("page_token") ?? 0);
  const until = Math.min(from + Number(query.get("limit") ?? 50), MANY);
  const items = Array.from({ length: until - from }, (_, index): Item => copyOf(first, from + index));
  return { ...body, [name]: items, next_page: until < MANY ? String(until) : null, ...("truncated" in body ? { truncated: until < MANY } : {}) };
}

/** An item of the list, with an identity of its own. */
function copyOf(item: Item, index: number): Item {
  const month = new Date(Date.UTC(2026, 9 - index, 1)).toISOString().slice(0, 7);
  const own: Item = { id: uuid(1_000_000 + index), node_id: uuid(2_000_000 + index), number: MANY - index, name: `item-${index}`, month, chain: { epoch: 1, shard: 3, seq: index } };
  // What has an id of its own stays on its node.
  const isNode = !("id" in item);
  return { ...item, ...Object.fromEntries(Object.entries(own).filter(([name]) => name in item && (name !== "node_id" || isNode))) };
}

/** What each page says where there is nothing: what is missing, and what comes next. */
const EMPTY: Readonly<Record<string, readonly string[]>> = {
  "/": ["Nothing is rented. The catalog shows what is free."],
  "/catalog": ["Nothing is offered at the moment."],
  "/allocations": ["There is no allocation. Choose a SKU in the catalog to rent GPUs."],
  "/ssh-keys": ["You have no SSH key. With one, allocations are reached by ssh; without one, by the terminal in the browser."],
  "/service-accounts": ["You have no service account. One lets a program rent for you without your password."],
  "/money": ["Nothing is posted. Top up to make the first posting.", "Nothing was paid in yet. Top up to begin.", "The first statement appears with the first posting."],
  "/notifications": ["Nothing receives your notifications. Add an e-mail or a webhook.", "Nothing has happened since this browser was connected for the first time."],
  "/sessions": ["You are logged in nowhere by a browser. Each login appears here."],
  "/nodes": ["No node is registered. Register the first one above."],
  "/gpus": ["No node is registered. Register one on the page Nodes."],
  "/health": ["No finding is open.", "Nothing is overridden: the table below holds."],
  "/rollouts": ["No version of the agent was rolled out. Begin a rollout above."],
  "/skus": ["No SKU is defined. Create the first one above."],
  "/policies": [],
  "/accounts": ["No account is open. One opens with the first payment of its holder, or above."],
  "/payment-events": ["The payment processor has sent no event. Events appear with the first payment."],
  "/terminals": ["No terminal was opened. Users open them on the pages of their allocations.", "No terminal was recorded."],
  "/logins": ["No browser is logged in. Each login appears here."],
  "/user-keys?user_id=ann": ["The user has no SSH key. Users add theirs on their page SSH keys."],
  "/roles": ["No platform role is granted. Grant one above."],
  "/keys": ["No replica answers. The page Fleet has those that are known."],
  "/audit": ["Nothing is recorded yet. Each change appears here."],
  "/requests?correlation_id=0199e3f4-cafe": ["No audited action has this correlation id. A request that was refused, or only read, changes nothing: its log lines say more."],
  "/operations": [
    "No node is registered. Register one on the page Nodes.", "There is no entity. The first one comes with a node or an account.",
    "No account is open. One opens with the first payment of its holder.", "No node reports its load. Each does once its agent has enrolled.",
    "No member is known. Read again in some seconds.",
  ],
  "/tree": ["There is no entity. The first one comes with a node or an account."],
  "/stuck": ["Nothing is stuck."],
  "/alerts": ["Nothing fires."],
  "/announcements": ["Nothing was announced. Announce something above.", "No user has a receiver. Users add theirs on their page Notifications."],
};

const isOfUsers = (address: string) => NAVIGATION[0]?.places.some(({ to }) => to === address) ?? false;
const OF_USERS = Object.keys(EMPTY).filter(isOfUsers);
const OF_ADMINS = Object.keys(EMPTY).filter((address) => !isOfUsers(address));

type Opened = readonly [role: Role, address: string];

/** Each page of the navigation for each role that may open it. */
const PAGES: readonly Opened[] = [...OF_USERS.flatMap((address): Opened[] => [["user", address], ["admin", address]]), ...OF_ADMINS.map((address): Opened => ["admin", address])];

/** The page once it has read all that it reads by itself. */
async function opened(role: Role, address: string): Promise<HTMLElement> {
  mock.role = role;
  const { queries } = openConsole(address);
  const main = await waitFor(() => document.querySelector("main") ?? Promise.reject(new Error("there is no page")));
  await waitFor(() => {
    // A page is read in a file of its own first.
    if (!main.querySelector("h1") || main.querySelector(".loading") || queries.isFetching() > 0) throw new Error(`${address} reads`);
  });
  return main;
}

let complaints: string[] = [];

beforeEach(() => {
  tallWindow();
  complaints = [];
  vi.spyOn(console, "error").mockImplementation((...parts) => void complaints.push(parts.map(String).join(" ").slice(0, 300)));
});
afterEach(() => {
  cleanup();
  expect(complaints).toEqual([]);
});

it("the table has each page of the navigation", () => {
  const places = NAVIGATION.flatMap((group) => group.places.map(({ to }) => to));
  expect(Object.keys(EMPTY).map((address) => address.split("?")[0]).sort()).toEqual([...places].sort());
});

describe("a page without an item", () => {
  it.each(PAGES)("says so to the role %s: %s", async (role, address) => {
    mock.allocations = [];
    lists(emptied);
    const main = await opened(role, address);
    const said = [...main.querySelectorAll(".none")].map((none) => none.textContent);
    expect(said).toEqual(expect.arrayContaining([...(EMPTY[address] ?? [])]));
    expect(said.length).toBeGreaterThan(0);
    for (const text of said) expect(text).toMatch(/^\w.+\.$/);
    expect(main.querySelector(".problem")).toBeNull();
  });
});

/** Answers that are read as a whole: what is in them does not grow with the users. */
const WITHOUT_PAGES = ["/keys", "/operations", "/alerts"];
/** Pages of one entity that has 10,000 of something. */
const OF_ONE: readonly Opened[] = [
  ["user", `/allocations/${uuid(101)}`], ["admin", `/nodes/${uuid(50)}`], ["admin", `/accounts/${uuid(1)}`], ["admin", `/rollouts/${uuid(1000)}`], ["user", "/rent?sku=h100-8"],
];

/** Of the pages of users, administrators have the same but for one: it has the users, too. */
const LONG: readonly Opened[] = [...PAGES.filter(([role, address]) => role === "user" || address === "/allocations" || !isOfUsers(address)), ...OF_ONE];

describe("a page of 10,000 items", () => {
  it.each(LONG)("draws and reads few of them for the role %s: %s", async (role, address) => {
    const asked = lists(long);
    const main = await opened(role, address);
    const rows = main.querySelectorAll("tbody tr, .virtual-row, .offers > li").length;
    expect(main.querySelectorAll("*").length).toBeLessThanOrEqual(8000);
    expect(rows).toBeLessThanOrEqual(300);
    for (const [path, times] of asked) expect(times, path).toBeLessThanOrEqual(15);
    const goesOn = [...main.querySelectorAll("button")].some(({ textContent, disabled }) => /^(Next page|Show more)/.test(textContent) && !disabled);
    const saysSo = /(more \w+ are|more are|there are more|only some of|only the (first|oldest|newest)) /i.test(main.textContent);
    if (!WITHOUT_PAGES.includes(address)) expect(goesOn || saysSo).toBe(true);
    expect(main.querySelector(".problem")).toBeNull();
  });
});
