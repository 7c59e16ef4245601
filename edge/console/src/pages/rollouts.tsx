// Rollouts: versions of the agent that nodes take one wave after the other.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { Link, useNavigate } from "@tanstack/react-router";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { newestFirst } from "../api/queries.ts";
import { POLL_MS, pollEvery } from "../api/query-client.ts";
import { count, gpuctl, shortId } from "../format/text.ts";
import { Action, Guard, REASON, type ActionSpec } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { State } from "../ui/state.tsx";
import { PagedTable } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";
import { whole } from "../ui/use-draft.ts";

type Rollout = Schemas["Rollout"];

const STATES: Schemas["RolloutState"][] = ["running", "paused", "stopped", "aborting", "aborted", "completed"];

export default function RolloutsPage() {
  const [address, set] = useAddress();
  const navigate = useNavigate();
  const rollouts = useQuery({
    queryKey: ["rollouts", address],
    queryFn: () => {
      const query = queryOf(address, ["state"]) as { state?: Schemas["RolloutState"] };
      return newestFirst((order) => dataOf(api.GET("/api/v1/admin/rollouts", { params: { query: { ...query, ...order } } })));
    },
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(POLL_MS),
  });
  return (
    <Guard needs="manage_nodes">
      <Head title="Rollouts" age={<Age query={rollouts} />}>
        <Action spec={{ ...create, done: (rollout) => void navigate({ to: "/rollouts/$id", params: { id: rollout.id } }) }} />
      </Head>
      <p className="soft page-note">A rollout updates the agents of nodes: a few first, the canaries, which are watched, then the others in waves. One runs at a time.</p>
      <Filters of={[{ name: "state", label: "State", options: STATES }]} address={address} set={set} />
      <PagedTable
        label="Rollouts"
        query={rollouts}
        page={address["page"]}
        open={(page) => set({ page })}
        keyOf={(rollout) => rollout.id}
        none={<Nothing address={address}>No version of the agent was rolled out. Begin a rollout above.</Nothing>}
        columns={[
          {
            title: "Rollout",
            cell: (rollout) => (
              <Link to="/rollouts/$id" params={{ id: rollout.id }} className="row-link">
                <code title={rollout.id}>{shortId(rollout.id)}</code>
              </Link>
            ),
          },
          { title: "State", cell: (rollout) => <State of={rollout.state} overdue={rollout.overdue} /> },
          { title: "Updated", number: true, cell: (rollout) => count(rollout.updated) },
          { title: "Failed", number: true, cell: (rollout) => count(rollout.failed) },
          { title: "Waiting", number: true, cell: (rollout) => waitingText(rollout) },
          { title: "Reason", cell: (rollout) => <Plain>{rollout.reason}</Plain> },
          { title: "By", cell: (rollout) => <Plain>{rollout.created_by}</Plain> },
          { title: "Begun", cell: (rollout) => <When at={rollout.created_at} /> },
        ]}
      />
    </Guard>
  );
}

/** How many nodes wait; more where not all of them are known yet. */
export function waitingText({ waiting, all_nodes_read }: Pick<Rollout, "waiting" | "all_nodes_read">): string {
  return all_nodes_read ? count(waiting) : `${count(waiting)} and more`;
}

const create: ActionSpec<Rollout> = {
  id: "create-rollout",
  primary: true,
  label: "Begin a rollout…",
  title: "Update the agents of nodes",
  consequences: (
    <ul>
      <li>Each agent restarts; allocations and terminals on its node go on.</li>
      <li>It stops by itself at the first node that fails, so that you decide.</li>
    </ul>
  ),
  fields: [
    { name: "digest", label: "Digest of the package", maxLength: 71, pattern: "sha256:[0-9a-f]{64}", help: "Left open: the version that this installation publishes." },
    { name: "max_unavailable", label: "Nodes at once", kind: "number", required: true, initial: "1", min: 1, max: 200 },
    { name: "canary", label: "Nodes to update first (canaries)", kind: "number", initial: "1", min: 0, max: 200, help: "They must succeed before the others begin." },
    { name: "soak_seconds", label: "Seconds to watch each wave", kind: "number", min: 0, max: 604_800 },
    { name: "sku", sentAs: "selector.sku", label: "Nodes of this SKU alone", maxLength: 64 },
    { name: "region_code", sentAs: "selector.region_code", label: "Nodes of this region alone", maxLength: 64 },
    { name: "include_held", label: "Also nodes in quarantine that another version may free", kind: "checkbox" },
    REASON,
  ],
  command: (values) =>
    gpuctl(
      "rollouts", "create", ["--digest", values["digest"]], ["--canary", values["canary"]], ["--max-unavailable", values["max_unavailable"]],
      ["--soak-seconds", values["soak_seconds"]], ...(values["include_held"] ? ["--include-held"] : []), ["--sku", values["sku"]], ["--region", values["region_code"]],
      ["--reason", values["reason"]],
    ),
  send: (values, key) => {
    const sku = values["sku"]?.trim();
    const region_code = values["region_code"]?.trim();
    const body: Schemas["NewRollout"] = {
      max_unavailable: whole(values["max_unavailable"]) ?? 1,
      reason: values["reason"] ?? "",
      canary: whole(values["canary"]),
      soak_seconds: whole(values["soak_seconds"]),
      digest: values["digest"]?.trim() || null,
      include_held: values["include_held"] === "yes",
      ...(sku || region_code ? { selector: { ...(sku ? { sku } : {}), ...(region_code ? { region_code } : {}) } } : {}),
    };
    return dataOf(api.POST("/api/v1/admin/rollouts", { params: keyed(key), body }));
  },
  refreshes: ["rollouts"],
};
