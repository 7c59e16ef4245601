// One rollout: how far it is, which nodes failed, and its pause, resumption and end.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { api, dataOf, type Schemas } from "../api/client.ts";
import { POLL_MS, pollEvery } from "../api/query-client.ts";
import { count, readable, shortId } from "../format/text.ts";
import { duration } from "../format/time.ts";
import { Action, Guard } from "../ui/action.tsx";
import { Card, Facts, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { PagedTable } from "../ui/table.tsx";
import { Id, Plain } from "../ui/text.tsx";
import { FullTime, When } from "../ui/time.tsx";
import { useAddress, usePart } from "../ui/use-address.ts";
import { rolloutActions } from "./rollout-actions.ts";
import { waitingText } from "./rollouts.tsx";

type Rollout = Schemas["Rollout"];

export default function RolloutPage() {
  const id = usePart("id");
  const rollout = useQuery({
    queryKey: ["rollout", id],
    queryFn: () => dataOf(api.GET("/api/v1/admin/rollouts/{id}", { params: { path: { id } } })),
    refetchInterval: pollEvery(POLL_MS),
  });
  return (
    <Guard needs="manage_nodes">
      <Loaded query={rollout}>
        {(data) => (
          <>
            <Head title={`Rollout ${shortId(data.id)}`} age={<Age query={rollout} />}>
              {rolloutActions(data).map((spec) => (
                <Action key={spec.id} spec={spec} />
              ))}
            </Head>
            <p className="why">
              <State of={data.state} overdue={data.overdue} /> <span className="soft">·</span> <Standing of={data} />
            </p>
            <dl className="numbers">
              <Number title="Updated" of={count(data.updated)} />
              <Number title="Under update" of={count(data.in_flight.length)} note={`at most ${count(data.max_unavailable)} at once`} />
              <Number title="Waiting" of={waitingText(data)} />
              <Number title="Failed" of={count(data.failed)} bad={data.failed > 0} />
              <Number title="Skipped" of={count(data.skipped)} />
            </dl>
            <div className="columns">
              <Nodes id={data.id} />
              <Card title="Summary">
                <Facts
                  of={[
                    ["Package", <Id key="d">{data.digest}</Id>],
                    ["Reason", <Plain key="r">{data.reason}</Plain>],
                    ["By", <Plain key="b">{data.created_by}</Plain>],
                    ["First nodes", count(data.canary)],
                    ["Watched for", duration(data.soak_seconds)],
                    ["Nodes", selectorText(data.selector)],
                    ["Held nodes", data.include_held ? "included" : "skipped"],
                    ["Begun", <FullTime key="t" at={data.created_at} />],
                    ["Id", <Id key="i">{data.id}</Id>],
                  ]}
                />
              </Card>
            </div>
          </>
        )}
      </Loaded>
    </Guard>
  );
}

function Number({ title, of, note, bad = false }: { title: string; of: string; note?: string; bad?: boolean }) {
  return (
    <div>
      <dt>{title}</dt>
      <dd data-tone={bad ? "bad" : undefined}>{of}</dd>
      {note && <dd className="soft">{note}</dd>}
    </div>
  );
}

function Standing({ of: rollout }: { of: Rollout }) {
  const { stopped_by, soaks_until, deadline_at, stage } = rollout;
  if (stopped_by) {
    return (
      <>
        <Link to="/nodes/$id" params={{ id: stopped_by.node_id }}>
          node <code title={stopped_by.node_id}>{shortId(stopped_by.node_id)}</code>
        </Link>{" "}
        stopped it: <Plain>{readable(stopped_by.reason)}</Plain>
      </>
    );
  }
  return (
    <>
      {stage === "canary" ? "the first nodes" : "in waves"}
      {soaks_until && (
        <>
          , the last wave is watched until <When at={soaks_until} />
        </>
      )}
      {deadline_at && (
        <span className="soft">
          {" "}
          · deadline <When at={deadline_at} />
        </span>
      )}
    </>
  );
}

function selectorText({ sku_id, region_code, node_ids }: Rollout["selector"]): string {
  if (node_ids && node_ids.length > 0) return `${count(node_ids.length)} chosen`;
  const parts = [sku_id ? `of SKU ${shortId(sku_id)}` : null, region_code ? `in ${region_code}` : null].filter(Boolean);
  return parts.length > 0 ? parts.join(", ") : "all";
}

function Nodes({ id }: { id: string }) {
  const [address, set] = useAddress();
  const page = address["page"];
  const nodes = useQuery({
    queryKey: ["rollout-nodes", id, page],
    queryFn: () => dataOf(api.GET("/api/v1/admin/rollouts/{id}/nodes", { params: { path: { id }, query: page ? { page_token: page } : {} } })),
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(POLL_MS),
  });
  return (
    <Card title="Nodes" actions={<Age query={nodes} />}>
      <PagedTable
        label="Nodes of the rollout"
        query={nodes}
        page={page}
        open={(next) => set({ page: next })}
        keyOf={(node) => node.node_id}
        none={<p>No node was reached yet.</p>}
        columns={[
          {
            title: "Node",
            cell: (node) => (
              <Link to="/nodes/$id" params={{ id: node.node_id }}>
                <Plain>{node.name ?? node.host}</Plain>
              </Link>
            ),
          },
          { title: "Outcome", cell: (node) => <State of={node.outcome === "open" ? "under update" : node.outcome} /> },
          { title: "Reason", cell: (node) => (node.reason ? <Plain>{readable(node.reason)}</Plain> : "") },
        ]}
      />
    </Card>
  );
}
