// The views of postings follow the balance: no event reports a posting, and the balance changes with each of them.
import type { QueryClient } from "@tanstack/react-query";
import type { Schemas } from "../api/client.ts";
import { BALANCE } from "./refresh.ts";

/** The queries that show postings, or sums of them. */
export const POSTINGS = ["ledger", "spending", "statements", "statement"];

/** Calls `changed` with the queries to be read again, whenever the balance is read and is another one. */
export function followBalance(queries: QueryClient, changed: (names: readonly string[]) => void): () => void {
  let last: string | null = null;
  return queries.getQueryCache().subscribe((event) => {
    if (event.type !== "updated" || event.action.type !== "success" || event.query.queryKey[0] !== BALANCE) return;
    const { id, balance_micro } = event.query.state.data as Schemas["BillingAccount"];
    const before = last;
    last = `${id}:${String(balance_micro)}`;
    if (before !== null && before !== last) changed(POSTINGS);
  });
}
