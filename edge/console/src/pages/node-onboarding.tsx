// The way of a node from its registration to its first allocation: the one command, and the steps that the machine has done.
import type { ReactNode } from "react";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { gpuctl } from "../format/text.ts";
import { Action, REASON } from "../ui/action.tsx";
import { Card } from "../ui/layout.tsx";
import { Copyable, Plain } from "../ui/text.tsx";
import { FullTime, When } from "../ui/time.tsx";

type Node = Schemas["Node"];

interface OnboardingStep {
  title: string;
  isDone: boolean;
  /** What is known of it, or what it waits for. */
  note: ReactNode;
}

/** The steps from the registration to the first allocation, in their order. */
export function onboardingSteps(node: Node): OnboardingStep[] {
  const { state, agent, inventory, hardware } = node;
  const isIssued = state !== "registered";
  const short = hardware.filter(({ is_enough }) => is_enough === false);
  return [
    { title: "Registered", isDone: true, note: <When at={node.created_at} /> },
    isByMaas(node)
      ? { title: "MAAS installs the machine", isDone: agent != null || node.machine?.step === "deployed", note: <Installation of={node} /> }
      : {
          title: "The set-up command is made",
          isDone: isIssued,
          note: isIssued ? "It is shown once. Make a new one where it is lost." : "Press “Set-up command…”. It gives a script, and the command that runs it on the machine.",
        },
    {
      title: "The agent has enrolled",
      isDone: agent != null,
      note: agent
        ? `Version ${agent.version}.`
        : isByMaas(node)
          ? "cloud-init installs it at the first boot. If it does not come: cloud-init status --wait on the machine says why."
          : "The machine connects by itself once the command has run. If it does not: the log of gpuaas-agent says why.",
    },
    {
      title: "The machine is as its SKU promises",
      isDone: inventory != null && short.length === 0,
      note: inventory == null ? "It is compared line by line below, with the first report." : short.length === 0 ? "Every line below is enough." : `${short.length} lines below are not enough.`,
    },
    { title: "It takes allocations", isDone: state === "active", note: state === "active" ? "" : <Plain>{node.unschedulable_reason ?? node.state_reason.message}</Plain> },
  ];
}

/** Whether a command is to be run on the machine. A token that is made while MAAS deploys it would void the one that MAAS hands to it. */
export function isSetUpByHand(node: Pick<Node, "onboarding_mode" | "machine">): boolean {
  return !isByMaas(node) || node.machine?.step === "deployed";
}

function isByMaas({ onboarding_mode }: Pick<Node, "onboarding_mode">): boolean {
  return onboarding_mode === "maas";
}

/** How far the bare-metal provider is, and what to do where it has failed. */
function Installation({ of: { machine, state_reason } }: { of: Node }) {
  if (!machine) return <>The service allocates the machine and has it deployed. Nothing is to be run on it.</>;
  const { step, status, step_entered_at } = machine;
  if (step === "failing" || step === "failed") {
    return (
      <>
        The deployment has failed: <Plain>{state_reason.message}</Plain> Repair the machine at MAAS and mark it as fixed. Then press “Reimage…”, or retire and remove the node.
      </>
    );
  }
  return (
    <>
      {step === "deployed" ? "Deployed" : "In progress"} since <When at={step_entered_at} />
      {status && (
        <>
          ; MAAS says: <Plain>{status}</Plain>
        </>
      )}
    </>
  );
}

export function Onboarding({ of: node }: { of: Node }) {
  const steps = onboardingSteps(node);
  const next = steps.findIndex(({ isDone }) => !isDone);
  return (
    <Card title="Onboarding">
      <ol className="ticks" aria-label="Onboarding">
        {steps.map(({ title, isDone, note }, index) => (
          <li key={title} data-done={isDone || undefined} aria-current={index === next ? "step" : undefined}>
            <strong>{title}</strong>
            <span className="hidden">{isDone ? ", done" : ", not done"}</span> <span className="soft">{note}</span>
          </li>
        ))}
      </ol>
    </Card>
  );
}

const REFRESHES = ["node", "nodes"];
const ONCE = <strong>This is the only time that it is shown.</strong>;

export function SetUp({ of: { id } }: { of: Node }) {
  return (
    <Action
      spec={{
        id: `bootstrap:${id}`,
        primary: true,
        label: "Set-up command…",
        title: "Set the machine up",
        consequences: (
          <p>
            The command holds a new enrollment token, which voids every older one. It is shown once. The node is active when its agent has enrolled.
          </p>
        ),
        command: () => gpuctl("nodes", "script", id),
        send: (_, key) => dataOf(api.POST("/api/v1/admin/nodes/{id}/bootstrap-script", { params: { path: { id }, ...keyed(key) }, body: { format: "script" } })),
        refreshes: REFRESHES,
        result: ({ command, script, expires_at }) => (
          <>
            <p>
              {ONCE} It can be used until <FullTime at={expires_at} />.
            </p>
            <p>Save the script where you reach the machine by SSH from, as bootstrap.sh, and run the command there. It runs the script on the machine, as root.</p>
            <Copyable text={command} label="command" />
            <details>
              <summary>The script</summary>
              <Copyable text={script} label="script" />
            </details>
          </>
        ),
      }}
    />
  );
}

/** A new token for a machine whose agent has lost its certificate. */
export function Reissue({ of: { id } }: { of: Node }) {
  return (
    <Action
      spec={{
        id: `reissue:${id}`,
        label: "Enroll again…",
        title: "Enroll this node again",
        consequences: <p>The agent gets a new token, for one use. The node keeps its identity and its allocations.</p>,
        fields: [{ name: "revoke", label: "The certificate that it has is void at once", kind: "checkbox", help: "For a certificate that others may have. Until the node has enrolled again it is offline." }, REASON],
        command: (values) => gpuctl("nodes", "reissue", id, ["--reason", values["reason"]], ...(values["revoke"] ? ["--revoke"] : [])),
        send: (values, key) =>
          dataOf(
            api.POST("/api/v1/admin/nodes/{id}/reissue-enrollment", {
              params: { path: { id }, ...keyed(key) },
              body: { reason: values["reason"] ?? "", revoke_current_certificate: values["revoke"] === "yes" },
            }),
          ),
        refreshes: REFRESHES,
        result: ({ recovery_bundle, expires_at }) => (
          <>
            <p>
              {ONCE} It can be used until <FullTime at={expires_at} />. Run it as root on the machine.
            </p>
            <Copyable text={recovery_bundle.restart_command} label="command" />
          </>
        ),
      }}
    />
  );
}
