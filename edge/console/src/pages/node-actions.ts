// What an administrator does with a node, as data: each is one request with a reason.
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { labelChanges, labelsText } from "../format/labels.ts";
import { gpuctl, shortId } from "../format/text.ts";
import { REASON, type ActionSpec, type FieldSpec } from "../ui/action.tsx";
import type { Values } from "../ui/use-draft.ts";

type Node = Schemas["Node"];
type State = Schemas["NodeState"];

const REFRESHES = ["node", "nodes", "tasks"];

interface NodeAction {
  way: "quarantine" | "release-quarantine" | "retire" | "reactivate" | "remove" | "reimage";
  label: string;
  title: string;
  consequences: string;
  danger?: boolean;
  in: readonly State[];
  /** Refused while an allocation is on the node. */
  needsEmpty?: boolean;
  fields?: readonly FieldSpec[];
  /** Options of gpuctl beside the reason. */
  options?: (values: Values) => string[];
  body?: (values: Values) => object;
}

const ACTIONS: readonly NodeAction[] = [
  {
    way: "quarantine",
    label: "Quarantine…",
    title: "Take this node out of rent",
    consequences: "No allocation begins on it until it is found in order. Its tenants stay.",
    in: ["active", "offline", "draining"],
  },
  {
    way: "release-quarantine",
    label: "Release the quarantine…",
    title: "Release the quarantine of this node",
    consequences: "It takes allocations again, if it is in order. What still holds it is named in the answer.",
    in: ["quarantined"],
  },
  {
    way: "retire",
    label: "Retire…",
    title: "Take this node out of service",
    consequences: "It takes no allocation any more. It is refused while allocations are on it, unless it is drained: then it retires when the last one ends.",
    danger: true,
    in: ["registered", "bootstrap-issued", "enrolling", "active", "offline", "draining", "quarantined"],
    fields: [{ name: "drain", label: "Wait for the allocations on it to end", kind: "checkbox" }],
    options: (values) => (values["drain"] ? ["--drain"] : []),
    body: (values) => ({ drain: values["drain"] === "yes" }),
  },
  {
    way: "reactivate",
    label: "Reactivate…",
    title: "Take this node into service again",
    consequences: "It takes allocations again, if it is in order.",
    in: ["retired"],
  },
  {
    way: "reimage",
    label: "Reimage…",
    title: "Erase the machine and install it again",
    consequences: "The bare-metal provider erases all of its disks. Its agent's identity is void at once; it stays in quarantine until the new system has passed its validation.",
    danger: true,
    in: ["active", "offline", "quarantined"],
    needsEmpty: true,
  },
  {
    way: "remove",
    label: "Remove…",
    title: "Remove this node for good",
    consequences: "Its identity, tokens and connections are void at once, on every replica. This cannot be undone.",
    danger: true,
    in: ["retired"],
    options: () => ["--yes"],
  },
];

/** A machine that its provider has not taken back in time is given up by its removal. */
const GIVE_UP: NodeAction = {
  way: "remove",
  label: "Give the machine up…",
  title: "Remove this node without its provider",
  consequences: "The provider has not taken the machine back. The node is removed all the same; release the machine at the provider yourself.",
  danger: true,
  in: ["removing"],
  options: () => ["--yes"],
};

/** The actions that the state of the node allows. */
export function actionsOf(node: Node): ActionSpec<unknown>[] {
  const allowed = ACTIONS.filter((action) => isAllowed(node, action));
  const overdue = node.state === "removing" && node.overdue && node.machine != null ? [GIVE_UP] : [];
  return [...[...allowed, ...overdue].map((action) => specOf(node, action)), ...taskActions(node)];
}

function isAllowed(node: Node, { in: states, way, needsEmpty = false }: NodeAction): boolean {
  return states.includes(node.state) && (way !== "reimage" || node.onboarding_mode === "maas") && !(needsEmpty && hasTenant(node));
}

/** Whether an allocation has a GPU of the node. */
function hasTenant({ inventory }: Node): boolean {
  return inventory?.gpus.some(({ allocation_id }) => allocation_id) ?? false;
}

function specOf({ id }: Node, action: NodeAction): ActionSpec<unknown> {
  const { way } = action;
  return {
    id: `${way}:${id}`,
    label: action.label,
    title: action.title,
    danger: action.danger ?? false,
    consequences: action.consequences,
    fields: [...(action.fields ?? []), REASON],
    command: (values) => gpuctl("nodes", way, id, ["--reason", values["reason"]], ...(action.options?.(values) ?? [])),
    send: (values, key) =>
      dataOf(
        api.POST(`/api/v1/admin/nodes/{id}/${way}`, {
          params: { path: { id }, ...keyed(key) },
          body: { reason: values["reason"] ?? "", ...action.body?.(values) },
        }),
      ),
    refreshes: REFRESHES,
  };
}

const ENROLLED: readonly State[] = ["active", "offline", "draining", "quarantined"];
const TO_ENROLL: readonly State[] = ["registered", "bootstrap-issued", "enrolling"];

function taskActions(node: Node): ActionSpec<unknown>[] {
  const { id, state } = node;
  const path = { id };
  const validation: ActionSpec<unknown>[] = [
    {
      id: `validate:${id}`,
      label: "Validate…",
      title: "Test the machine under load",
      consequences: "It gets no allocation before the validation ends. Below a minimum of its SKU it is quarantined.",
      fields: [
        {
          name: "level",
          label: "Level",
          kind: "select",
          required: true,
          initial: "quick",
          options: [
            { value: "quick", label: "quick: about ten seconds" },
            { value: "deep", label: "deep: some minutes (policy node.deep_validation_seconds)" },
          ],
        },
        REASON,
      ],
      command: (values) => gpuctl("nodes", "validate", id, ["--level", values["level"]], ["--reason", values["reason"]]),
      send: (values, key) => {
        const body = { level: values["level"] as Schemas["ValidationLevel"], reason: values["reason"] ?? "" };
        return dataOf(api.POST("/api/v1/admin/nodes/{id}/validate", { params: { path, ...keyed(key) }, body }));
      },
      refreshes: REFRESHES,
    },
  ];
  const tasks: ActionSpec<unknown>[] = [
    {
      id: `run:${id}`,
      label: "Run a task…",
      title: "Run a task on the machine",
      consequences: "A reboot ends everything that runs on it. Diagnostics only read.",
      fields: [
        {
          name: "type",
          label: "Task",
          kind: "select",
          required: true,
          initial: "diagnostics.collect",
          options: [
            { value: "diagnostics.collect", label: "Collect diagnostics" },
            { value: "node.reboot", label: "Reboot" },
          ],
        },
        REASON,
      ],
      command: (values) => gpuctl("nodes", "run", id, values["type"] ?? "", ["--reason", values["reason"]]),
      send: (values, key) => {
        const body = { type: values["type"] as Schemas["NodeTaskType"], reason: values["reason"] ?? "" };
        return dataOf(api.POST("/api/v1/admin/nodes/{id}/tasks", { params: { path, ...keyed(key) }, body }));
      },
      refreshes: REFRESHES,
    },
  ];
  // A node that never enrolled may be in quarantine, too: it has no agent that a task could be sent to.
  if (!ENROLLED.includes(state) || node.agent == null) return [];
  return [...(hasTenant(node) ? [] : validation), ...tasks, updateAgent(node)];
}

/** Its name, address and labels. */
export function reviseNode(node: Node): ActionSpec<Node> {
  const { id } = node;
  return {
    id: `revise:${id}`,
    label: "Edit…",
    title: "Change this node's name and address",
    consequences: "Tenants connect to the address: change it only where the machine answers at the new one. What runs on the node goes on.",
    fields: [
      { name: "host", label: "Host", required: true, maxLength: 253, initial: node.host },
      { name: "port", label: "SSH port", kind: "number", required: true, min: 1, max: 65_535, initial: String(node.port) },
      { name: "ssh_username", label: "SSH user of the operators", required: true, maxLength: 32, initial: node.ssh_username },
      { name: "name", label: "Name", maxLength: 63, initial: node.name ?? "" },
      { name: "labels", label: "Labels", maxLength: 4000, initial: labelsText(node.labels), help: "As key=value, separated by commas." },
    ],
    command: (values) => {
      const labels = labelChanges(node.labels, values["labels"] ?? "");
      return gpuctl(
        "nodes", "update", id, ["--host", values["host"]], ["--port", values["port"]], ["--ssh-user", values["ssh_username"]],
        ...(values["name"]?.trim() ? [["--name", values["name"].trim()] as const] : node.name ? ["--no-name"] : []),
        ...Object.entries(labels).map(([key, value]) => (value === null ? (["--remove-label", key] as const) : (["--label", `${key}=${value}`] as const))),
      );
    },
    send: (values) => {
      const text = (name: string) => values[name]?.trim() ?? "";
      const labels = labelChanges(node.labels, values["labels"] ?? "");
      const body: Schemas["NodeChange"] = {
        host: text("host"),
        port: Number(text("port")),
        ssh_username: text("ssh_username"),
        name: text("name") || null,
        ...(Object.keys(labels).length > 0 ? { labels } : {}),
      };
      return dataOf(api.PATCH("/api/v1/admin/nodes/{id}", { params: { path: { id } }, body }));
    },
    refreshes: REFRESHES,
  };
}

export function resetGpu(node: string, gpu: string): ActionSpec<unknown> {
  return {
    id: `reset-gpu:${node}:${gpu}`,
    label: "Reset the GPU…",
    title: `Reset GPU ${shortId(gpu)}`,
    danger: true,
    consequences: "What runs on the GPU would be lost: it is refused while an allocation holds it. The GPU is validated afterwards; where that fails, the machine is rebooted once it is empty.",
    fields: [REASON],
    command: (values) => gpuctl("nodes", "reset-gpu", node, gpu, ["--reason", values["reason"]]),
    send: (values, key) =>
      dataOf(
        api.POST("/api/v1/admin/nodes/{id}/gpus/{gpu_uuid}/reset", {
          params: { path: { id: node, gpu_uuid: gpu }, ...keyed(key) },
          body: { reason: values["reason"] ?? "" },
        }),
      ),
    refreshes: REFRESHES,
  };
}

/** Another version of the agent on this node alone. */
export function updateAgent({ id }: Node): ActionSpec<unknown> {
  return {
    id: `update-agent:${id}`,
    label: "Update the agent…",
    title: "Update the agent of this node",
    consequences: "The agent restarts; allocations and terminals go on. It goes back to its version where the new one does not start.",
    fields: [
      { name: "digest", label: "Digest of the package", maxLength: 71, pattern: "sha256:[0-9a-f]{64}", help: "Left open: the version that this installation publishes." },
      { name: "force", label: "Also a version that was rolled back on this node", kind: "checkbox" },
      REASON,
    ],
    command: (values) => gpuctl("nodes", "update-agent", id, ["--digest", values["digest"]], ...(values["force"] ? ["--force"] : []), ["--reason", values["reason"]]),
    send: (values, key) => {
      const body = { reason: values["reason"] ?? "", force: values["force"] === "yes", digest: values["digest"]?.trim() || null };
      return dataOf(api.POST("/api/v1/admin/nodes/{id}/update-agent", { params: { path: { id }, ...keyed(key) }, body }));
    },
    refreshes: REFRESHES,
  };
}

/** Whether it can be enrolled again. */
export function isToReissue({ state, agent }: Node): boolean {
  return agent != null && !["draining", "removing", "removed"].includes(state);
}

/** Whether it is removed, or is about to be: it cannot be changed any more. */
export function isGone({ state }: Node): boolean {
  return state === "removing" || state === "removed";
}

/** Whether the machine waits for its agent. */
export function isToEnroll(node: Node): boolean {
  return TO_ENROLL.includes(node.state);
}
