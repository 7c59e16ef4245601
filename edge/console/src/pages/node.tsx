// One node: its state and why, its findings, its tasks, and what an administrator does with it.
import { useQuery } from "@tanstack/react-query";
import { api, dataOf, type Schemas } from "../api/client.ts";
import { POLL_MS, POLL_SOON_MS, pollEvery } from "../api/query-client.ts";
import { everyPage } from "../api/queries.ts";
import { count, readable } from "../format/text.ts";
import { useMay } from "../session/me.ts";
import { Action, Guard } from "../ui/action.tsx";
import { GuardedLink } from "../ui/guarded-link.tsx";
import { Card, Facts, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { DevicePaths, Id, Labels, Plain } from "../ui/text.tsx";
import { FullTime, When } from "../ui/time.tsx";
import { GrowingTable } from "../ui/table.tsx";
import { usePart } from "../ui/use-address.ts";
import { actionsOf, isGone, isToEnroll, isToReissue, reviseNode } from "./node-actions.ts";
import { NodeFindings } from "./node-findings.tsx";
import { Machine } from "./node-machine.tsx";
import { isSetUpByHand, Onboarding, Reissue, SetUp } from "./node-onboarding.tsx";
import { NodeTasks } from "./node-tasks.tsx";
import { NodeTenants, tenantsQuery } from "./node-tenants.tsx";
import { NodeTimeline } from "./node-timeline.tsx";
import { NodeValidations } from "./node-validations.tsx";
import { terminalColumns } from "./terminals.tsx";

type Node = Schemas["Node"];

export default function NodePage() {
  const id = usePart("id");
  const node = useQuery({
    queryKey: ["node", id],
    queryFn: () => dataOf(api.GET("/api/v1/admin/nodes/{id}", { params: { path: { id } } })),
    refetchInterval: (query) => pollEvery(query.state.data && isToEnroll(query.state.data) ? POLL_SOON_MS : POLL_MS)(),
  });
  const tenants = useQuery({ ...tenantsQuery(id), enabled: useMay()("manage_nodes") });
  return (
    <Guard needs="manage_nodes">
      <Loaded query={node}>
        {(data) => (
          <>
            <Head title={data.name ?? data.host} age={<Age query={node} />}>
              {isToEnroll(data) && isSetUpByHand(data) && <SetUp of={data} />}
              {!isGone(data) && <Action spec={reviseNode(data)} />}
              {isToReissue(data) && <Reissue of={data} />}
              {actionsOf(data).map((spec) => (
                <Action key={spec.id} spec={spec} />
              ))}
            </Head>
            <p className="why">
              <State of={data.state} overdue={data.overdue} /> <span className="soft">·</span> <Plain>{data.state_reason.message}</Plain>
              {data.state_deadline_at && (
                <span className="soft">
                  {" "}
                  · deadline <When at={data.state_deadline_at} />
                </span>
              )}
            </p>
            {data.unschedulable_reason && (
              <p className="soft page-note">
                It takes no allocation: <Plain>{data.unschedulable_reason}</Plain>
              </p>
            )}
            <div className="columns">
              <div>
                {isToEnroll(data) && <Onboarding of={data} />}
                <Machine of={data} />
                <NodeFindings of={data} />
                <NodeTasks id={data.id}>
                  {(ended) => (
                    <>
                      <NodeValidations of={data} ended={ended} />
                      <NodeTimeline of={data} ended={ended} tenants={tenants.data?.items ?? []} />
                    </>
                  )}
                </NodeTasks>
                <NodeTenants of={tenants} />
                <Terminals id={data.id} />
              </div>
              <aside>
                <Summary of={data} />
                <Holds of={data} />
              </aside>
            </div>
          </>
        )}
      </Loaded>
    </Guard>
  );
}

const OPEN: readonly Schemas["TerminalSessionState"][] = ["opened", "attached", "detached"];
/** Of each state at most so many terminals are read. */
const MOST_TERMINALS = 1000;

/** The terminals of all nodes that are open. The API filters them by one state, and by their user: those of a node are chosen here. */
async function openTerminals(): Promise<{ items: Schemas["TerminalSession"][]; isPartial: boolean }> {
  const lists = await Promise.all(
    OPEN.map((state) =>
      everyPage(MOST_TERMINALS, (page_token) => dataOf(api.GET("/api/v1/admin/terminal-sessions", { params: { query: { state, limit: 200, ...(page_token ? { page_token } : {}) } } }))),
    ),
  );
  return { items: lists.flatMap(({ items }) => items), isPartial: lists.some(({ isPartial }) => isPartial) };
}

function Terminals({ id }: { id: string }) {
  const mayOperate = useMay()("operate_terminals");
  const sessions = useQuery({
    queryKey: ["terminals", "of-all-nodes"],
    queryFn: openTerminals,
    enabled: mayOperate,
    refetchInterval: pollEvery(POLL_MS),
  });
  if (!mayOperate) return null;
  return (
    <Card title="Terminals" actions={<Age query={sessions} />}>
      <Loaded query={sessions}>
        {({ items, isPartial }) => (
          <>
            <GrowingTable
              label="Terminals"
              rows={items.filter(({ node_id }) => node_id === id)}
              keyOf={(session) => session.id}
              none={<p>No terminal is open.</p>}
              columns={terminalColumns.filter(({ title }) => title !== "Node" && title !== "Ended because")}
            />
            {isPartial && <p className="soft">Only some of the open terminals were read; the list of terminals has the others.</p>}
          </>
        )}
      </Loaded>
    </Card>
  );
}

function Summary({ of: node }: { of: Node }) {
  return (
    <Card title="Summary">
      <Facts
        of={[
          ["Host", <Plain key="h">{`${node.host}:${node.port}`}</Plain>],
          ["SKU", <Plain key="s">{node.sku}</Plain>],
          ["Region", <Plain key="r">{node.region_code}</Plain>],
          ["GPUs", `${count(node.gpus_free)} of ${count(node.gpus_total)} free`],
          ["Agent", node.agent ? `${node.agent.version}` : "none yet"],
          node.agent ? ["Last report", <When key="l" at={node.agent.last_seen_at} />] : null,
          node.agent?.cert_not_after ? ["Certificate ends", <When key="c" at={node.agent.cert_not_after} />] : null,
          node.agent_update ? ["Agent's update", <State key="u" of={node.agent_update.state} />] : null,
          node.repair ? ["Repair", <State key="y" of={node.repair.phase} />] : null,
          node.machine ? ["At the provider", <State key="m" of={node.machine.step} />] : null,
          node.probe ? ["SSH port", <State key="p" of={node.probe.result} />] : null,
          node.validation ? ["Validation", <State key="v" of={node.validation.passed ? "passed" : "failed"} />] : null,
          node.validation && node.validation.shortfalls.length > 0 ? ["Shortfalls", node.validation.shortfalls.join("; ")] : null,
          node.inventory ? ["Tenants' devices", <TenantDevices key="d" of={node.inventory.tenant_devices} />] : null,
          ["Onboarding", node.onboarding_mode],
          ["Labels", <Labels key="b" of={node.labels} />],
          ["Registered", <FullTime key="t" at={node.created_at} />],
          ["Id", <Id key="i">{node.id}</Id>],
          ["History", <GuardedLink key="e" needs="operate_runtime" to="/entities/$kind/$id" params={{ kind: "node", id: node.id }}>of its state machine</GuardedLink>],
        ]}
      />
    </Card>
  );
}

/** What all tenants of the machine may open beside their own GPUs (decision 0089). */
function TenantDevices({ of }: { of: readonly string[] }) {
  return of.length === 0 ? <span className="soft">none beside their GPUs</span> : <DevicePaths of={of} />;
}

function Holds({ of: { quarantine_holds } }: { of: Node }) {
  if (quarantine_holds.length === 0) return null;
  return (
    <Card title="Held in quarantine by">
      <ul className="plain-list">
        {quarantine_holds.map((hold) => (
          <li key={`${hold.code}:${hold.since_at}`}>
            <strong>{readable(hold.code)}</strong> <Plain>{hold.message}</Plain>{" "}
            <span className="soft">
              {hold.author}, <When at={hold.since_at} />
            </span>
          </li>
        ))}
      </ul>
    </Card>
  );
}
