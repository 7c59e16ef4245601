// The fleet at a glance: GPUs, money, members, and what needs attention.
import { Suspense } from "react";
import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { api, dataOf, type Schemas } from "../api/client.ts";
import { POLL_MS, pollOfMembers, pollUnreported } from "../api/query-client.ts";
import { money } from "../format/money.ts";
import { count, readable } from "../format/text.ts";
import { duration } from "../format/time.ts";
import { Guard } from "../ui/action.tsx";
import { Card, Head } from "../ui/layout.tsx";
import { lazyPart } from "../ui/lazy-part.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { Table } from "../ui/table.tsx";
import { useAddress } from "../ui/use-address.ts";
import { troubledMembers, troublesOf } from "./member-troubles.tsx";
import { overdueQuery } from "./supervision-tree.tsx";

const FleetCharts = lazyPart(() => import("./fleet-charts.tsx"), () => <p className="soft">The charts cannot be shown before the page is loaded again.</p>);

export const overviewQuery = {
  queryKey: ["fleet-overview"],
  queryFn: () => dataOf(api.GET("/api/v1/admin/overview")),
  // A member that falls silent is no change of an entity.
  refetchInterval: pollOfMembers,
};

export default function OperationsPage() {
  const overview = useQuery(overviewQuery);
  return (
    <Guard needs="operate_runtime">
      <Head title="Fleet" age={<Age query={overview} polled />} />
      <Loaded query={overview}>
        {(data) => (
          <>
            <dl className="numbers">
              <div>
                <dt>GPUs in use</dt>
                <dd>{count(data.gpus.reduce((sum, row) => sum + row.gpus_held, 0))}</dd>
                <dd className="soft">of {count(data.gpus.reduce((sum, row) => sum + row.gpus_total, 0))}</dd>
              </div>
              <div>
                <dt>Overdue</dt>
                <dd data-tone={data.overdue > 0 ? "bad" : undefined}>{count(data.overdue)}</dd>
                <dd className="soft">{data.overdue > 0 ? <Link to="/stuck">See why</Link> : "nothing"}</dd>
              </div>
              <div>
                <dt>Parked</dt>
                <dd data-tone={data.parked > 0 ? "bad" : undefined}>{count(data.parked)}</dd>
                <dd className="soft">{data.parked > 0 ? <Link to="/stuck">See why</Link> : "nothing"}</dd>
              </div>
              <div>
                <dt>Silent members</dt>
                <dd data-tone={data.silent_members.length > 0 ? "bad" : undefined}>{count(data.silent_members.length)}</dd>
                <dd className="soft">of the cluster</dd>
              </div>
              <TroubledMembers />
            </dl>
            <Card title="GPUs">
              <Table
                label="GPUs"
                rows={data.gpus}
                keyOf={(row) => `${row.sku_id}:${row.region_code}`}
                none={<p>No node is registered. Register one on the page Nodes.</p>}
                columns={[
                  { title: "SKU", cell: (row) => <Plain>{row.sku}</Plain> },
                  { title: "Region", cell: (row) => <Plain>{row.region_code}</Plain> },
                  { title: "Nodes", number: true, cell: (row) => count(row.nodes) },
                  { title: "In use", number: true, cell: (row) => <InUse of={row} /> },
                  { title: "Held", number: true, cell: (row) => count(row.gpus_held) },
                  { title: "Free", number: true, cell: (row) => count(row.gpus_free) },
                  { title: "Withheld", number: true, cell: (row) => count(withheldOf(row)) },
                  { title: "Total", number: true, cell: (row) => count(row.gpus_total) },
                ]}
              />
            </Card>
            <Suspense fallback={null}>
              <FleetCharts skus={different(data.gpus.map(({ sku }) => sku))} regions={different(data.gpus.map(({ region_code }) => region_code))} />
            </Suspense>
            <div className="columns">
              <Card title="Entities">
                <Table
                  label="Entities"
                  rows={Object.entries(data.entities_by_kind).flatMap(([kind, states]) => Object.entries(states).map(([state, many]) => ({ kind, state, many })))}
                  keyOf={({ kind, state }) => `${kind}:${state}`}
                  none={<p>There is no entity. The first one comes with a node or an account.</p>}
                  columns={[
                    {
                      title: "Kind",
                      cell: ({ kind, state }) => (
                        <Link to="/tree" search={{ kind, state } as never}>
                          {readable(kind)}
                        </Link>
                      ),
                    },
                    { title: "State", cell: ({ state }) => <State of={state} /> },
                    { title: "Count", number: true, cell: ({ many }) => count(many) },
                  ]}
                />
              </Card>
              <Card title="Money">
                <Table
                  label="Money"
                  rows={data.money}
                  keyOf={(row) => row.currency}
                  none={<p>No account is open. One opens with the first payment of its holder.</p>}
                  columns={[
                    { title: "Currency", cell: (row) => row.currency },
                    { title: "Accounts", number: true, cell: (row) => count(row.accounts) },
                    { title: "Depleted", number: true, cell: (row) => count(row.depleted) },
                    { title: "Balances", number: true, cell: (row) => money(row.balance_minor, row.currency) },
                  ]}
                />
              </Card>
            </div>
          </>
        )}
      </Loaded>
      <Load />
      <Members />
    </Guard>
  );
}

/** Members with a worker, a consumer or a clock that needs an operator. */
function TroubledMembers() {
  const tree = useQuery(overdueQuery);
  const troubled = tree.data ? troubledMembers(troublesOf(tree.data.members)) : null;
  return (
    <div>
      <dt>Members in trouble</dt>
      <dd data-tone={troubled ? "bad" : undefined}>{troubled === null ? "–" : count(troubled)}</dd>
      <dd className="soft">{troubled === null ? "not known" : troubled > 0 ? <Link to="/stuck">See why</Link> : "no parked worker, lag or wrong clock"}</dd>
    </div>
  );
}

type Gpus = Schemas["GpuOverview"];

function different(names: readonly string[]): string[] {
  return [...new Set(names)].sort();
}

/** Neither held nor offered: their node is drained, held in quarantine or out of contact, or they have a finding. */
export function withheldOf({ gpus_total, gpus_held, gpus_free }: Pick<Gpus, "gpus_total" | "gpus_held" | "gpus_free">): number {
  return Math.max(0, gpus_total - gpus_held - gpus_free);
}

function InUse({ of: { gpus_held, gpus_total, sku, region_code } }: { of: Gpus }) {
  if (gpus_total === 0) return <>–</>;
  return (
    <span className="use">
      <meter min={0} max={gpus_total} value={gpus_held} aria-label={`GPUs of ${sku} in use in ${region_code}`} /> {percent((gpus_held / gpus_total) * 100)}
    </span>
  );
}

function Load() {
  // Samples, which no event reports.
  const fleet = useQuery({ queryKey: ["fleet-load"], queryFn: () => dataOf(api.GET("/api/v1/admin/telemetry/fleet")), refetchInterval: pollUnreported(15_000) });
  return (
    <Card title="Load" actions={<Age query={fleet} polled />}>
      <Loaded query={fleet}>
        {({ items, silent_nodes }) => (
          <>
            <Table
              label="Load"
              rows={items}
              keyOf={(row) => `${row.sku_id}:${row.region_code}`}
              none={<p>No node reports its load. Each does once its agent has enrolled.</p>}
              columns={[
                { title: "SKU", cell: (row) => <Plain>{row.sku}</Plain> },
                { title: "Region", cell: (row) => <Plain>{row.region_code}</Plain> },
                { title: "Nodes that report", number: true, cell: (row) => `${count(row.reporting)} of ${count(row.nodes)}` },
                { title: "GPUs", number: true, cell: (row) => percent(row.gpus.utilization_percent) },
                { title: "GPU memory", number: true, cell: (row) => shareOf(row.gpus.memory_used_mib, row.gpus.memory_total_mib) },
                { title: "Hottest", number: true, cell: (row) => (row.gpus.temperature_celsius_max == null ? "–" : `${row.gpus.temperature_celsius_max} °C`) },
                { title: "Power", number: true, cell: (row) => (row.gpus.power_watts == null ? "–" : power(row.gpus.power_watts)) },
                { title: "Processors", number: true, cell: (row) => percent(row.cpu.utilization_percent) },
                { title: "Memory", number: true, cell: (row) => shareOf(row.memory.used_mib, row.memory.total_mib) },
                { title: "Storage", number: true, cell: (row) => shareOf(row.storage.used_gib, row.storage.total_gib) },
              ]}
            />
            {silent_nodes.count > 0 && <p className="soft">{count(silent_nodes.count)} {silent_nodes.count === 1 ? "node reports" : "nodes report"} nothing.</p>}
          </>
        )}
      </Loaded>
    </Card>
  );
}

/** Watts in the unit that reads best. */
export function power(watts: number): string {
  return watts < 1000 ? `${count(Math.round(watts))} W` : `${count(Math.round(watts / 100) / 10)} kW`;
}

function percent(value: number | null | undefined): string {
  return value == null ? "–" : `${count(Math.round(value))} %`;
}

function shareOf(used: number | null | undefined, total: number): string {
  return used == null || total === 0 ? "–" : percent((used / total) * 100);
}

function Members() {
  const [address, set] = useAddress();
  // A member's clock, silence and shards are no changes of entities.
  const cluster = useQuery({ queryKey: ["cluster"], queryFn: () => dataOf(api.GET("/api/v1/admin/runtime/cluster")), refetchInterval: pollUnreported(POLL_MS) });
  return (
    <Card title="Members of the cluster" actions={<Age query={cluster} polled />}>
      <Loaded query={cluster}>
        {({ members, unowned_shards, incarnation }) => (
          <>
            <Table
              label="Members"
              rows={members}
              order={{ of: address["sort"], set: (sort) => set({ sort }, { inPlace: true }) }}
              keyOf={(member) => member.id}
              none={<p>No member is known. Read again in some seconds.</p>}
              columns={[
                { title: "Member", by: (member) => member.name, cell: (member) => <Plain>{member.name}</Plain> },
                { title: "Roles", cell: (member) => member.roles.map(readable).join(", ") },
                { title: "Shards", number: true, by: (member) => member.shards.length, cell: (member) => count(member.shards.length) },
                { title: "Silent for", number: true, by: (member) => member.silent_for_ms, cell: (member) => duration(member.silent_for_ms / 1000) },
                { title: "Clock offset", number: true, by: (member) => member.clock_offset_ms, cell: (member) => (member.clock_offset_ms == null ? "–" : `${member.clock_offset_ms} ms`) },
                { title: "Started", by: (member) => member.started_at, cell: (member) => <When at={member.started_at} /> },
              ]}
            />
            <p className="soft">
              Incarnation {incarnation}, {count(unowned_shards)} shards without an owner
            </p>
          </>
        )}
      </Loaded>
    </Card>
  );
}
