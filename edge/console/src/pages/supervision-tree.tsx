// The supervision tree: members with their workers, and the entities of the filter. Only the rows on screen are drawn.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import type { paths } from "../../generated/schema.d.ts";
import { api, dataOf, type Schemas } from "../api/client.ts";
import { pollOfMembers } from "../api/query-client.ts";
import { count, shortId, readable } from "../format/text.ts";
import { Guard } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Card, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { State } from "../ui/state.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { Pager, Table } from "../ui/table.tsx";
import { useAddress, type Address } from "../ui/use-address.ts";
import { VirtualTable } from "../ui/virtual-table.tsx";
import { RestartWorker } from "./restart-worker.tsx";

type Entity = Schemas["EntityNode"];

/** As many entities as the API gives in one answer. */
const LIMIT = 1000;
const ROW_PX = 34;

type Kind = NonNullable<NonNullable<paths["/api/v1/admin/runtime/tree"]["get"]["parameters"]["query"]>["kind"]>;

/** Each kind of the API's description: one that is missing here does not compile. */
const OF_KIND: Readonly<Record<Kind, true>> = {
  node: true, allocation: true, sku: true, tenant: true, bindings: true, service_account: true, policy: true, health_rules: true, rollout: true, terminal_session: true,
  browser_session: true, key_set: true, billing_account: true, announcement: true, payment: true, processor_event: true, notification_endpoint: true, runtime: true,
};
export const KINDS = Object.keys(OF_KIND);

export const treeQuery = (address: Address) => ({
  queryKey: ["tree", address],
  queryFn: () => {
    const { kind, state, page } = address;
    const query = {
      limit: LIMIT,
      ...(kind ? { kind: kind as Kind } : {}),
      ...(state ? { state } : {}),
      ...(address["overdue"] === "true" ? { overdue: true } : {}),
      ...(address["parked"] === "true" ? { parked: true } : {}),
      ...(page ? { page_token: page } : {}),
    };
    return dataOf(api.GET("/api/v1/admin/runtime/tree", { params: { query } }));
  },
  placeholderData: keepPreviousData,
  refetchInterval: pollOfMembers,
});

/** What is overdue, with all members. */
export const overdueQuery = treeQuery({ overdue: "true" });

export default function TreePage() {
  const [address, set] = useAddress();
  const tree = useQuery(treeQuery(address));
  return (
    <Guard needs="operate_runtime">
      <Head title="Tree" age={<Age query={tree} polled />} />
      <Filters
        of={[
          { name: "kind", label: "Kind", options: KINDS },
          { name: "state", label: "State" },
          { name: "overdue", label: "Overdue", options: ["true"] },
          { name: "parked", label: "Parked", options: ["true"] },
        ]}
        address={address}
        set={set}
      />
      <Loaded query={tree}>
        {(data) => (
          <>
            {data.silent.length > 0 && (
              <p className="banner" data-tone="bad">
                <span>{silentMembers(data.silent.length)}</span>
              </p>
            )}
            {data.members.map((member) => (
              <Member key={member.id} of={member} />
            ))}
            <Card title={`Entities: ${count(data.entities.length)}${data.truncated ? ", more match" : ""}`}>
              <Entities rows={data.entities} address={address} />
              {(address["page"] || data.next_page) && <Pager label="Entities" page={address["page"]} next={data.next_page} open={(page) => set({ page })} />}
            </Card>
          </>
        )}
      </Loaded>
    </Guard>
  );
}

/** What is missing from an answer of the tree. */
export function silentMembers(many: number): string {
  return many === 1 ? "1 member did not answer: what it owns is not shown." : `${count(many)} members did not answer: what they own is not shown.`;
}

function Member({ of: member }: { of: Schemas["MemberNode"] }) {
  const broken = member.workers.filter(({ state }) => state !== "running");
  return (
    <details className="card" open={broken.length > 0}>
      <summary>
        <strong>
          <Plain>{member.name}</Plain>
        </strong>{" "}
        <span className="soft">
          {count(member.shards)} shards, {count(member.awake)} entities awake, mailboxes {count(member.mailbox_depth)}, version {member.version}, {count(member.workers.length)}{" "}
          workers
        </span>{" "}
        {broken.length > 0 && <State of={`${broken.length} not running`} overdue={false} />}
      </summary>
      <Table
        label={`Workers of ${member.name}`}
        rows={member.workers}
        keyOf={(worker) => `${worker.under}/${worker.name}`}
        none={null}
        columns={[
          { title: "Worker", cell: (worker) => <code>{worker.name}</code> },
          { title: "What it does", cell: (worker) => worker.what },
          { title: "State", cell: (worker) => <State of={worker.state} /> },
          { title: "Restarts", number: true, cell: (worker) => count(worker.restarts) },
          { title: "Since", cell: (worker) => <When at={worker.since} /> },
          { title: "Queue", number: true, cell: (worker) => queueText(worker.queue) },
          { title: "Last error", cell: (worker) => <Plain>{worker.last_error}</Plain> },
          { title: "Actions", cell: (worker) => (worker.restartable ? <RestartWorker member={member} worker={worker.name} /> : "") },
        ]}
      />
    </details>
  );
}

/** What waits, of what may wait; a consumer has no bound, since JetStream has its events. */
function queueText(queue: Schemas["WorkerNode"]["queue"]): string {
  if (!queue) return "–";
  return queue.bound == null ? count(queue.waiting) : `${count(queue.waiting)} of ${count(queue.bound)}`;
}

const COLUMNS = ["Entity", "State", "Actor", "Waits for", "Deadline", "Member"];
const keyOf = ({ kind, id }: Entity) => `${kind}:${id}`;

function Entities({ rows, address }: { rows: readonly Entity[]; address: Address }) {
  if (rows.length === 0) {
    return (
      <div className="none">
        <Nothing address={address}>There is no entity. The first one comes with a node or an account.</Nothing>
      </div>
    );
  }
  return (
    <VirtualTable
      label="Entities"
      kind="entities"
      columns={COLUMNS}
      rows={rows}
      keyOf={keyOf}
      rowPx={ROW_PX}
      cells={(row) => [
        <Link to="/entities/$kind/$id" params={{ kind: row.kind, id: row.id }}>
          {readable(row.kind)} <code title={row.id}>{shortId(row.id)}</code>
        </Link>,
        row.state ? <State of={row.state} overdue={row.overdue} /> : "–",
        <State of={row.status} />,
        <Plain>{row.waits_for ?? row.last_error}</Plain>,
        <When at={row.deadline_at} />,
        <Plain>{row.member_name}</Plain>,
      ]}
    />
  );
}
