// The reads that more than one page has.
import { keepPreviousData, queryOptions } from "@tanstack/react-query";
import { api, dataOf, type Schemas } from "./client.ts";
import { ApiFailure } from "./failure.ts";
import { freshFor, POLL_MS, POLL_SOON_MS, pollEvery, pollUnreported } from "./query-client.ts";
import { rememberRented } from "../live/messages.ts";
import { readStored, store } from "../ui/browser-storage.ts";
import { queryOf, type Address } from "../ui/use-address.ts";

export type Allocation = Schemas["Allocation"];

/** The parameter of a list that begins with the newest; without it, lists begin with the oldest. */
type NewestFirst = { order?: "newest_first" };

/** When the order was last refused in this tab. */
const ORDER_REFUSED = "gpuaas-order-refused-at";
/** Longer than an upgrade of the service takes. */
const UPGRADE_MS = 15 * 60_000;

/** A list that grows with time, the newest first. A replica of an earlier release refuses the order: while the service is upgraded, all lists of the tab begin with the oldest.
 * Otherwise each read may have another order, and a page's token of one release is refused by the other. */
export async function newestFirst<T>(read: (order: NewestFirst) => Promise<T>): Promise<T> {
  const refusedAt = Number(readStored("session", ORDER_REFUSED) ?? NaN);
  if (Math.abs(Date.now() - refusedAt) < UPGRADE_MS) return read({});
  try {
    return await read({ order: "newest_first" });
  } catch (error) {
    if (!(error instanceof ApiFailure && error.status === 400 && error.details["field"] === "order")) throw error;
    store("session", ORDER_REFUSED, String(Date.now()));
    return read({});
  }
}

/** How often the balance is read again that what runs is paid from, while the tab has input. */
export const BALANCE_MS = 60_000;

/** What runs costs money all the time, which no event reports. Where nothing runs, payments alone change a balance, and are reported. */
const pollBalance = (account: Schemas["BillingAccount"] | undefined) => Math.min(pollEvery(POLL_MS)(), account?.running === 0 ? Infinity : pollUnreported(BALANCE_MS)());

export const balanceQuery = queryOptions({
  queryKey: ["balance"],
  queryFn: () => dataOf(api.GET("/api/v1/billing/balance")),
  refetchInterval: ({ state }) => pollBalance(state.data),
  // Several pages show it: with a stream, going from one to the next reads it no oftener than it is polled.
  staleTime: () => Math.min(freshFor(), BALANCE_MS),
});

export const catalogQuery = queryOptions({
  queryKey: ["catalog"],
  queryFn: () => dataOf(api.GET("/api/v1/skus", { params: { query: { limit: 200 } } })),
  // Prices are not reported to users.
  refetchInterval: pollUnreported(60_000),
});

export const capacityQuery = queryOptions({
  queryKey: ["capacity"],
  queryFn: () => dataOf(api.GET("/api/v1/capacity")),
  // What others rent is not reported to users.
  refetchInterval: pollUnreported(POLL_MS),
});

/** At most this many keys of a user are offered in a form. */
const MOST_KEYS = 1000;

/** The keys of all pages: keys that are revoked stay in the list, so that the usable ones may be on a later page. */
export const usableSshKeysQuery = queryOptions({
  queryKey: ["ssh-keys", "usable"],
  queryFn: async () => {
    const { items, isPartial } = await everyPage(MOST_KEYS, (page_token) => dataOf(api.GET("/api/v1/ssh-keys", { params: { query: { limit: 200, ...(page_token ? { page_token } : {}) } } })));
    return { keys: items.filter(({ revoked_at }) => !revoked_at), isPartial };
  },
  refetchInterval: pollEvery(60_000),
});

export const sshKeysQuery = (page?: string) =>
  queryOptions({
    queryKey: ["ssh-keys", page],
    queryFn: () => dataOf(api.GET("/api/v1/ssh-keys", { params: { query: page ? { page_token: page } : {} } })),
    placeholderData: keepPreviousData,
    // Another client of the user may add one: that is reported to operators alone.
    refetchInterval: pollUnreported(60_000),
  });

const CHANGING = new Set<Allocation["state"]>(["requested", "provisioning", "releasing"]);

/** Whether its next state is seconds away. */
export function isChanging(allocation: Allocation): boolean {
  return CHANGING.has(allocation.state);
}

export const allocationsQuery = (address: Address) =>
  queryOptions({
    queryKey: ["allocations", address],
    queryFn: () => {
      const { label, ...query } = queryOf(address, ["state", "sku", "name", "label", "user_id"]);
      const filter = { ...query, ...(label ? { label: [label] } : {}) } as { state?: Allocation["state"] };
      return newestFirst((order) => dataOf(api.GET("/api/v1/allocations", { params: { query: { ...filter, ...order } } })));
    },
    placeholderData: keepPreviousData,
    refetchInterval: (query) => pollEvery(query.state.data?.items.some(isChanging) ? POLL_SOON_MS : POLL_MS)(),
  });

/** The states of what is rented. */
const RENTED: readonly Allocation["state"][] = ["requested", "provisioning", "active", "releasing", "release_failed"];

/** What a user rents at the moment, the newest first. The list of the API takes one state at a time. */
export async function readRented(user_id: string): Promise<{ items: Allocation[]; isPartial: boolean }> {
  const pages = await Promise.all(RENTED.map((state) => newestFirst((order) => dataOf(api.GET("/api/v1/allocations", { params: { query: { state, user_id, ...order } } })))));
  const items = pages.flatMap((page) => page.items).sort((a, b) => b.requested_at.localeCompare(a.requested_at));
  return { items, isPartial: pages.some(({ next_page }) => next_page) };
}

export const rentedQuery = (user_id: string) =>
  queryOptions({
    queryKey: ["allocations", "rented", user_id],
    queryFn: async () => {
      const rented = await readRented(user_id);
      rememberRented(rented.items.map(({ id }) => id));
      return rented;
    },
    refetchInterval: (query) => pollEvery(query.state.data?.items.some(isChanging) ? POLL_SOON_MS : POLL_MS)(),
  });

export const allocationQuery = (id: string) =>
  queryOptions({
    queryKey: ["allocation", id],
    queryFn: () => dataOf(api.GET("/api/v1/allocations/{id}", { params: { path: { id } } })),
    refetchInterval: (query) => {
      const allocation = query.state.data;
      if (allocation?.state === "released") return false;
      return pollEvery(allocation && isChanging(allocation) ? POLL_SOON_MS : POLL_MS)();
    },
  });

/** Of this many nodes at most are all pages read; a larger fleet is narrowed by a filter. */
const MOST_NODES = 2000;

/** The nodes of all pages, at most 2,000. */
export async function allNodes(filter: { sku?: string; state?: Schemas["NodeState"] }): Promise<{ items: Schemas["Node"][]; isPartial: boolean }> {
  return everyPage(MOST_NODES, (page_token) => dataOf(api.GET("/api/v1/admin/nodes", { params: { query: { ...filter, limit: 200, ...(page_token ? { page_token } : {}) } } })));
}

/** The items of all pages up to a bound. */
export async function everyPage<T>(most: number, read: (token: string | undefined) => Promise<{ items: T[]; next_page?: string | null }>): Promise<{ items: T[]; isPartial: boolean }> {
  const items: T[] = [];
  let token: string | undefined;
  do {
    const page = await read(token);
    items.push(...page.items);
    token = page.next_page ?? undefined;
  } while (token && items.length < most);
  return { items, isPartial: token !== undefined };
}
