// The allocations that are or were on a node, with the times of each.
import { Link } from "@tanstack/react-router";
import { queryOptions, type UseQueryResult } from "@tanstack/react-query";
import { api, dataOf } from "../api/client.ts";
import { everyPage, type Allocation } from "../api/queries.ts";
import { POLL_MS, SAFETY_MS, pollEvery } from "../api/query-client.ts";
import { count } from "../format/text.ts";
import { Card } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { GrowingTable } from "../ui/table.tsx";
import { FullTime } from "../ui/time.tsx";
import { COLUMNS, OWNER } from "./allocation-table.tsx";

/** As many allocations of one node as are read, the newest first. Above it the present ones are read by their states: one of them may be older. */
const MOST_TENANTS = 2000;
/** One page: each of them holds a GPU of the node. */
const MOST_PRESENT = 200;
const PRESENT: readonly Allocation["state"][] = ["provisioning", "active", "releasing", "release_failed"];

export interface Tenants {
  items: Allocation[];
  isPartial: boolean;
}

async function readTenants(node_id: string): Promise<Tenants> {
  const read = (most: number, filter: { state?: Allocation["state"] }) =>
    everyPage(most, (page_token) => dataOf(api.GET("/api/v1/allocations", { params: { query: { ...filter, node_id, limit: 200, ...(page_token ? { page_token } : {}) } } })));
  const newest = await read(MOST_TENANTS, {});
  if (!newest.isPartial) return newest;
  const present = (await Promise.all(PRESENT.map((state) => read(MOST_PRESENT, { state })))).flatMap(({ items }) => items);
  const ids = new Set(present.map(({ id }) => id));
  return { items: [...present, ...newest.items.filter(({ id }) => !ids.has(id))], isPartial: true };
}

export const tenantsQuery = (node_id: string) =>
  queryOptions({
    queryKey: ["allocations", "of-node", node_id],
    queryFn: () => readTenants(node_id),
    // Many pages are not read every few seconds.
    refetchInterval: (query) => (query.state.data?.isPartial ? SAFETY_MS : pollEvery(POLL_MS)()),
  });

const when = (at: string | null | undefined) => (at ? <FullTime at={at} /> : "–");
const SHOWN = new Set(["Allocation", "GPUs"]);

export function NodeTenants({ of: tenants }: { of: UseQueryResult<Tenants> }) {
  return (
    <Card title="Tenants" actions={<Age query={tenants} />}>
      <Loaded query={tenants}>
        {({ items, isPartial }) => (
          <>
            <GrowingTable
              label="Tenants"
              rows={items}
              keyOf={({ id }) => id}
              none={<p>No allocation is or was on it.</p>}
              columns={[
                ...COLUMNS.filter(({ title }) => SHOWN.has(title)),
                OWNER,
                { title: "State", cell: (row) => <State of={row.state} overdue={row.overdue} /> },
                { title: "Requested", cell: ({ requested_at }) => when(requested_at) },
                { title: "Active from", cell: ({ active_at }) => when(active_at) },
                { title: "Released", cell: ({ released_at }) => when(released_at) },
              ]}
            />
            {isPartial && (
              <p className="soft">
                Only the present ones and the newest {count(MOST_TENANTS)} are read; earlier ones that are released are left out. <Link to="/allocations">All allocations</Link>
              </p>
            )}
          </>
        )}
      </Loaded>
    </Card>
  );
}
