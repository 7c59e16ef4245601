// The allocations that are or were on a node, with the times of each.
import { Link } from "@tanstack/react-router";
import { queryOptions, type UseQueryResult } from "@tanstack/react-query";
import { api, dataOf } from "../api/client.ts";
import { newestFirst, type Allocation } from "../api/queries.ts";
import { POLL_MS, pollEvery } from "../api/query-client.ts";
import { count } from "../format/text.ts";
import { Card } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { GrowingTable } from "../ui/table.tsx";
import { FullTime } from "../ui/time.tsx";
import { COLUMNS, OWNER } from "./allocation-table.tsx";

/** As many allocations of one node as are read. */
const MOST_TENANTS = 2000;

export interface Tenants {
  items: Allocation[];
  isPartial: boolean;
}

export const tenantsQuery = (node_id: string) =>
  queryOptions({
    queryKey: ["allocations", "of-node", node_id],
    queryFn: (): Promise<Tenants> =>
      newestFirst(MOST_TENANTS, (page_token) => dataOf(api.GET("/api/v1/allocations", { params: { query: { node_id, limit: 200, ...(page_token ? { page_token } : {}) } } }))),
    refetchInterval: pollEvery(POLL_MS),
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
                Only the first {count(MOST_TENANTS)} are read. <Link to="/allocations">All allocations</Link>
              </p>
            )}
          </>
        )}
      </Loaded>
    </Card>
  );
}
