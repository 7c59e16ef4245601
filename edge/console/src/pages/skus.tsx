// The catalog's entries, with the approvals of two people for each change of status.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { pollUnreported } from "../api/query-client.ts";
import { money } from "../format/money.ts";
import { count, gpuctl, mebibytes, readable } from "../format/text.ts";
import { useMe } from "../session/me.ts";
import { createSku, priceSku } from "./sku-actions.ts";
import { Action, Guard, REASON, type ActionSpec } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { State } from "../ui/state.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { PagedTable } from "../ui/table.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";

type Sku = Schemas["Sku"];
type Way = Schemas["SkuStatusChange"];

const STATUSES: Schemas["SkuStatus"][] = ["draft", "active", "deprecated", "inactive"];

export default function SkusPage() {
  const [address, set] = useAddress();
  const skus = useQuery({
    queryKey: ["skus", address],
    queryFn: () => dataOf(api.GET("/api/v1/admin/skus", { params: { query: queryOf(address, ["status"]) as { status?: Schemas["SkuStatus"] } } })),
    placeholderData: keepPreviousData,
    // Changes are reported to operators alone, and others may see SKUs.
    refetchInterval: pollUnreported(30_000),
  });
  return (
    <Guard needs="see_skus">
      <Head title="SKUs" age={<Age query={skus} ofOperators />}>
        <Action needs="manage_skus" spec={createSku} />
      </Head>
      <p className="soft page-note">A change of status takes effect with the approvals of two people: one in the role platform operations, one in the role inventory owner.</p>
      <Filters of={[{ name: "status", label: "Status", options: STATUSES }]} address={address} set={set} />
      <PagedTable
        label="SKUs"
        query={skus}
        page={address["page"]}
        open={(page) => set({ page })}
        keyOf={(sku) => sku.id}
        none={<Nothing address={address}>No SKU is defined. Create the first one above.</Nothing>}
        columns={[
          { title: "SKU", cell: (sku) => <Plain>{sku.name}</Plain> },
          { title: "Status", cell: (sku) => <State of={sku.status} /> },
          { title: "GPUs", cell: (sku) => `${sku.gpu.count} × ${sku.gpu.model}, ${mebibytes(sku.gpu.memory_mib)}` },
          { title: "Cores", number: true, cell: (sku) => count(sku.cpu.cores) },
          { title: "Per GPU and hour", number: true, cell: (sku) => (sku.price ? money(sku.price.amount_minor_per_gpu_hour, sku.price.currency) : "–") },
          { title: "Regions", cell: (sku) => sku.allowed_regions.join(", ") },
          { title: "Approvals", cell: (sku) => <Approvals of={sku.approvals} /> },
          { title: "Actions", cell: (sku) => <Decisions of={sku} /> },
        ]}
      />
    </Guard>
  );
}

const APPROVERS: Schemas["ApprovalRole"][] = ["platform_operations", "inventory_owner"];

/** For each change that waits: which of the two roles has approved it, and which has not. */
export function approvalsByChange(approvals: Sku["approvals"]) {
  return [...new Set(approvals.map(({ change }) => change))].map((change) => ({
    change,
    roles: APPROVERS.map((role) => ({ role, approval: approvals.find((given) => given.change === change && given.role === role) })),
  }));
}

function Approvals({ of: approvals }: { of: Sku["approvals"] }) {
  if (approvals.length === 0) return <span className="soft">none wait</span>;
  return (
    <ul className="plain-list">
      {approvalsByChange(approvals).map(({ change, roles }) => (
        <li key={change}>
          <strong>{change}</strong>
          <ul className="ticks">
            {roles.map(({ role, approval }) => (
              <li key={role} data-done={approval !== undefined || undefined}>
                {readable(role)}: {approval ? <Given approval={approval} /> : <span className="soft">not yet</span>}
              </li>
            ))}
          </ul>
        </li>
      ))}
    </ul>
  );
}

function Given({ approval }: { approval: Sku["approvals"][number] }) {
  return (
    <>
      <Plain>{approval.actor}</Plain>, <Plain>{approval.reason}</Plain>
      {approval.impact_review && <span className="soft"> · impact: <Plain>{approval.impact_review}</Plain></span>}
      {approval.rollback_plan && <span className="soft"> · way back: <Plain>{approval.rollback_plan}</Plain></span>}
      {approval.expires_at && <span className="soft"> · void <When at={approval.expires_at} /></span>}
    </>
  );
}

const WAYS: Record<Schemas["SkuStatus"], readonly Way[]> = {
  draft: ["activate"],
  active: ["deprecate", "deactivate"],
  deprecated: ["activate", "deactivate"],
  inactive: ["activate"],
};
const EFFECTS: Record<Way, string> = {
  activate: "It is offered, and can be rented.",
  deprecate: "It is not offered for new rentals. What runs on it stays.",
  deactivate: "It cannot be rented. What runs on it stays.",
};

/** What an approval has for consequences: the first one waits, the second one takes effect, and one of another change replaces the first. */
export function consequencesOf(way: Way, role: string, approvals: Sku["approvals"]): string {
  const first = approvals.find(({ expires_at }) => expires_at != null);
  if (!first) return `${EFFECTS[way]} It takes effect when the other role has approved it too.`;
  const given = `${first.actor} has approved to ${first.change} it, as ${readable(first.role)}.`;
  if (first.change !== way) return `${EFFECTS[way]} It takes effect when the other role has approved it too. ${given} Your approval takes the place of that one.`;
  return first.role === role ? `${EFFECTS[way]} ${given} Another approval in that role changes nothing.` : `${EFFECTS[way]} ${given} Yours takes effect at once.`;
}

/** What is asked for to take an approval back that waits: the status that the SKU has, or one that a draft cannot have. */
const STAY: Record<Schemas["SkuStatus"], Way> = { draft: "deprecate", active: "activate", deprecated: "deprecate", inactive: "deactivate" };

export function withdraw({ id, name, status }: Pick<Sku, "id" | "name" | "status">): ActionSpec<unknown> {
  const way = STAY[status];
  return {
    id: `withdraw:${id}`,
    label: "Withdraw the approval…",
    title: `Withdraw the approval that waits: ${name}`,
    consequences: "It stays as it is. The change needs the approvals of both roles again.",
    fields: [REASON],
    command: (values) => gpuctl("skus", way, [name], ["--reason", values["reason"]]),
    send: (values, key) => dataOf(api.POST(`/api/v1/admin/skus/{id}/${way}`, { params: { path: { id }, ...keyed(key) }, body: { reason: values["reason"] ?? "" } })),
    refreshes: ["skus", "catalog"],
  };
}

function Decisions({ of: sku }: { of: Sku }) {
  const { platform_roles } = useMe();
  const roles = platform_roles.filter((role): role is Schemas["ApprovalRole"] => role === "platform_operations" || role === "inventory_owner");
  const spec = (way: Way): ActionSpec<unknown> => ({
    id: `${way}:${sku.id}`,
    label: `${way[0]?.toUpperCase()}${way.slice(1)}…`,
    title: `Approve: ${way} ${sku.name}`,
    danger: way === "deactivate",
    consequences: (values) => consequencesOf(way, values["role"] ?? "", sku.approvals),
    fields: [
      { name: "role", label: "Your role", kind: "select", required: true, initial: roles[0] ?? "", options: roles.map((role) => ({ value: role, label: readable(role) })) },
      REASON,
      { name: "impact_review", label: "Impact", kind: "area", maxLength: 4000, help: "Who is concerned, and how it was checked." },
      { name: "rollback_plan", label: "Way back", kind: "area", maxLength: 4000 },
    ],
    command: (values) =>
      gpuctl(
        "skus", way, [sku.name], ["--reason", values["reason"]], ["--role", values["role"]?.replaceAll("_", "-")], ["--impact-review", values["impact_review"]],
        ["--rollback-plan", values["rollback_plan"]],
      ),
    send: (values, key) =>
      dataOf(
        api.POST(`/api/v1/admin/skus/{id}/${way}`, {
          params: { path: { id: sku.id }, ...keyed(key) },
          body: {
            reason: values["reason"] ?? "",
            role: values["role"] as Schemas["ApprovalRole"],
            impact_review: values["impact_review"]?.trim() || null,
            rollback_plan: values["rollback_plan"]?.trim() || null,
          },
        }),
      ),
    refreshes: ["skus", "catalog"],
  });
  return (
    <span className="row-actions">
      <Action quiet needs="manage_skus" spec={priceSku(sku)} />
      {roles.length > 0 && sku.approvals.some(({ expires_at }) => expires_at != null) && <Action quiet needs="approve_skus" spec={withdraw(sku)} />}
      {roles.length > 0 &&
        WAYS[sku.status].map((way) => (
        <Action key={way} quiet needs="approve_skus" spec={spec(way)} />
      ))}
    </span>
  );
}
