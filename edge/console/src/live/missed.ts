// What changed in the user's allocations while this browser had no connection, out of their own histories.
import { queryOptions } from "@tanstack/react-query";
import { api, dataOf } from "../api/client.ts";
import { ApiFailure } from "../api/failure.ts";
import { readRented, type Allocation } from "../api/queries.ts";
import { pollEvery } from "../api/query-client.ts";
import type { StreamMessage } from "./event-stream.ts";
import { connectionBefore } from "./messages.ts";

/** At most this many allocations that have ended are read. */
const MOST_ENDED = 50;

export interface MissedChange {
  id: string;
  allocation_id: string;
  state: string;
  reason: string;
  time: string;
}

/** The changes after that instant that no message has reported. */
export function missedChanges(allocations: readonly Allocation[], since: string, received: readonly StreamMessage[]): MissedChange[] {
  const reported = new Set(received.map(({ data }) => `${data.allocation_id ?? ""} ${data.state ?? ""}`));
  return allocations.flatMap(({ id, status_history }) =>
    status_history
      .filter(({ at, state }) => Date.parse(at) > Date.parse(since) && !reported.has(`${id} ${state}`))
      .map(({ at, state, reason }) => ({ id: `${id} ${state} ${at}`, allocation_id: id, state, reason, time: at })),
  );
}

/** The allocations of the user that may have changed since the last connection: what is rented, and what was rented then. */
export const missedQuery = (user_id: string) =>
  queryOptions({
    queryKey: ["allocations", "missed", user_id],
    queryFn: async () => {
      const before = connectionBefore();
      if (before === null) return [];
      const { items } = await readRented(user_id);
      const ended = before.rented.filter((id) => !items.some((rented) => rented.id === id)).slice(0, MOST_ENDED);
      return [...items, ...(await Promise.all(ended.map(endedAllocation))).filter((allocation) => allocation !== null)];
    },
    refetchInterval: pollEvery(60_000),
  });

async function endedAllocation(id: string): Promise<Allocation | null> {
  return dataOf(api.GET("/api/v1/allocations/{id}", { params: { path: { id } } })).catch((error: unknown) => {
    // Its retention may have ended.
    if (error instanceof ApiFailure && error.status === 404) return null;
    throw error;
  });
}
