// Platform roles: which users have which, bound and revoked with a reason.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { pollEvery } from "../api/query-client.ts";
import { gpuctl, readable } from "../format/text.ts";
import { Action, Guard, REASON, type ActionSpec } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { PagedTable } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";

type Binding = Schemas["PlatformRoleBinding"];
type Role = Schemas["PlatformRoleName"];

const MEANINGS: Record<Role, string> = {
  platform_operations: "is notified about nodes, and approves SKUs",
  inventory_owner: "approves SKUs",
  billing_operations: "adjusts accounts, and settles payment events",
  auditor: "reads the audit log",
};
const ROLES = Object.keys(MEANINGS) as Role[];

export default function PlatformRolesPage() {
  const [address, set] = useAddress();
  const bindings = useQuery({
    queryKey: ["platform-roles", address],
    queryFn: () => dataOf(api.GET("/api/v1/admin/platform-roles/bindings", { params: { query: queryOf(address, ["subject", "role"]) as { role?: Role } } })),
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(30_000),
  });
  return (
    <Guard needs="bind_platform_roles">
      <Head title="Roles" age={<Age query={bindings} />}>
        <Action spec={bind} />
      </Head>
      <p className="soft page-note">The roles user and admin come from the identity provider. These come from here, and hold beside them.</p>
      <Filters
        of={[
          { name: "subject", label: "User", hint: "its id" },
          { name: "role", label: "Role", options: ROLES },
        ]}
        address={address}
        set={set}
      />
      <PagedTable
        label="Roles"
        query={bindings}
        page={address["page"]}
        open={(page) => set({ page })}
        keyOf={(binding) => binding.id}
        none={<Nothing address={address}>No platform role is granted. Grant one above.</Nothing>}
        columns={[
          { title: "User", cell: (binding) => <Plain>{binding.subject}</Plain> },
          { title: "Role", cell: (binding) => readable(binding.role) },
          { title: "Who has it", cell: (binding) => MEANINGS[binding.role] },
          { title: "Reason", cell: (binding) => <Plain>{binding.reason}</Plain> },
          { title: "By", cell: (binding) => <Plain>{binding.bound_by}</Plain> },
          { title: "Since", cell: (binding) => <When at={binding.bound_at} /> },
          { title: "Actions", cell: (binding) => <Action quiet spec={revoke(binding)} /> },
        ]}
      />
    </Guard>
  );
}

const bind: ActionSpec<Binding> = {
  id: "bind-role",
  primary: true,
  label: "Grant…",
  title: "Grant a role",
  consequences: <p>The user has it from the next request on. A change of a SKU needs two people in two roles: grant them to different users.</p>,
  fields: [
    { name: "subject", label: "User", required: true, maxLength: 255, help: "The id of the user at the identity provider (sub)." },
    { name: "role", label: "Role", kind: "select", required: true, options: ROLES.map((role) => ({ value: role, label: `${readable(role)}: ${MEANINGS[role]}` })) },
    REASON,
  ],
  command: (values) => gpuctl("roles", "bind", [values["subject"]?.trim() || "USER"], [values["role"] || "ROLE"], ["--reason", values["reason"]]),
  send: (values, key) => {
    const body = { subject: values["subject"]?.trim() ?? "", role: values["role"] as Role, reason: values["reason"] ?? "" };
    return dataOf(api.POST("/api/v1/admin/platform-roles/bindings", { params: keyed(key), body })) as Promise<Binding>;
  },
  refreshes: ["platform-roles", "me"],
};

function revoke({ subject, role }: Binding): ActionSpec<unknown> {
  return {
    id: `revoke-role:${subject}:${role}`,
    label: "Revoke…",
    title: `Revoke the role ${readable(role)}`,
    danger: true,
    consequences: (
      <p>
        Every replica refuses <Plain>{subject}</Plain> what the role allows, from the answer on.
      </p>
    ),
    fields: [REASON],
    command: (values) => gpuctl("roles", "revoke", [subject], [role], ["--reason", values["reason"]]),
    send: (values) => dataOf(api.DELETE("/api/v1/admin/platform-roles/bindings", { params: { query: { subject, role, reason: values["reason"] ?? "" } } })),
    refreshes: ["platform-roles", "me"],
  };
}
