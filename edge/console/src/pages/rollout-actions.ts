// The pause, the resumption and the end of a rollout.
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { gpuctl } from "../format/text.ts";
import { REASON, type ActionSpec } from "../ui/action.tsx";

interface RolloutStep {
  way: "pause" | "resume" | "abort";
  label: string;
  title: string;
  consequences: string;
  in: readonly Schemas["RolloutState"][];
  danger?: boolean;
}

const STEPS: readonly RolloutStep[] = [
  { way: "pause", label: "Pause…", title: "Pause this rollout", consequences: "Nodes under update finish; no other node begins.", in: ["running"] },
  {
    way: "resume",
    label: "Resume…",
    title: "Resume this rollout",
    consequences: "It goes on with the nodes that wait. A node that failed stays as it is, and is not tried again.",
    in: ["paused", "stopped"],
  },
  {
    way: "abort",
    label: "Abort…",
    title: "End this rollout",
    consequences: "Nodes under update finish, no other begins, and it cannot be resumed. Nodes that are updated stay updated.",
    in: ["running", "paused", "stopped"],
    danger: true,
  },
];

/** What its state allows. */
export function rolloutActions({ id, state }: Pick<Schemas["Rollout"], "id" | "state">): ActionSpec<unknown>[] {
  return STEPS.filter((step) => step.in.includes(state)).map(({ way, label, title, consequences, danger = false }) => ({
    id: `${way}:${id}`,
    label,
    title,
    danger,
    consequences,
    fields: [REASON],
    command: (values) => gpuctl("rollouts", way, id, ["--reason", values["reason"]]),
    send: (values, key) =>
      dataOf(api.POST(`/api/v1/admin/rollouts/{id}/${way}`, { params: { path: { id }, ...keyed(key) }, body: { reason: values["reason"] ?? "" } })),
    refreshes: ["rollout", "rollouts", "rollout-nodes"],
  }));
}
