// The fleet's nodes, for administrators.
import { keepPreviousData, queryOptions, useQuery } from "@tanstack/react-query";
import { Link, useNavigate } from "@tanstack/react-router";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { everyPage } from "../api/queries.ts";
import { POLL_MS, pollEvery } from "../api/query-client.ts";
import { gpuctl, shortId } from "../format/text.ts";
import { useMay } from "../session/me.ts";
import { Action, Guard, type FieldSpec } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { State } from "../ui/state.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { PagedTable } from "../ui/table.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";

const STATES: Schemas["NodeState"][] = [
  "registered", "bootstrap-issued", "enrolling", "active", "offline", "draining", "quarantined", "retired", "removing", "removed",
];

export default function NodesPage() {
  const [address, set] = useAddress();
  const nodes = useQuery({
    queryKey: ["nodes", address],
    queryFn: () => {
      const { label, ...query } = queryOf(address, ["state", "sku", "name", "label"]);
      const filter = { ...query, ...(label ? { label: [label] } : {}) } as { state?: Schemas["NodeState"] };
      return dataOf(api.GET("/api/v1/admin/nodes", { params: { query: filter } }));
    },
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(POLL_MS),
  });
  return (
    <Guard needs="manage_nodes">
      <Head title="Nodes" age={<Age query={nodes} />}>
        <Register />
      </Head>
      <Filters
        of={[
          { name: "state", label: "State", options: STATES },
          { name: "sku", label: "SKU" },
          { name: "name", label: "Name" },
          { name: "label", label: "Label", hint: "key=value" },
        ]}
        address={address}
        set={set}
      />
      <PagedTable
        label="Nodes"
        query={nodes}
        page={address["page"]}
        open={(page) => set({ page })}
        keyOf={(node) => node.id}
        none={<Nothing address={address}>No node is registered. Register the first one above.</Nothing>}
        columns={[
          {
            title: "Node",
            cell: (node) => (
              <Link to="/nodes/$id" params={{ id: node.id }} className="row-link">
                <Plain>{node.name ?? node.host}</Plain>
              </Link>
            ),
          },
          { title: "State", cell: (node) => <State of={node.state} overdue={node.overdue} /> },
          { title: "Why", cell: (node) => <Plain>{node.unschedulable_reason ?? node.state_reason.message}</Plain> },
          { title: "Health", cell: (node) => <State of={node.health.status} /> },
          { title: "SKU", short: true, cell: (node) => <Plain>{node.sku}</Plain> },
          { title: "Region", short: true, cell: (node) => <Plain>{node.region_code}</Plain> },
          { title: "Free", number: true, cell: (node) => `${node.gpus_free} of ${node.gpus_total}` },
          { title: "Since", cell: (node) => <When at={node.state_entered_at} /> },
          { title: "Id", short: true, cell: (node) => <code title={node.id}>{shortId(node.id)}</code> },
        ]}
      />
    </Guard>
  );
}

/** As many SKUs are offered in the form. */
const MOST_SKUS = 1000;

/** The SKUs that a node can be of, for those who may see them. */
const skusOfNodesQuery = queryOptions({
  queryKey: ["skus", "of-nodes"],
  queryFn: async () => {
    const { items, isPartial } = await everyPage(MOST_SKUS, (page_token) => dataOf(api.GET("/api/v1/admin/skus", { params: { query: { limit: 200, ...(page_token ? { page_token } : {}) } } })));
    return { skus: items.filter(({ status }) => status !== "inactive"), isPartial };
  },
  refetchInterval: pollEvery(60_000),
});

/** A choice of the SKUs; a text where they are not known, or are too many. */
export function skuField(known: { skus: readonly Pick<Schemas["Sku"], "name" | "gpu" | "allowed_regions">[]; isPartial: boolean } | undefined): FieldSpec {
  const field = { name: "sku", label: "SKU", required: true, maxLength: 64 };
  if (!known || known.isPartial || known.skus.length === 0) return field;
  const label = ({ name, gpu, allowed_regions }: (typeof known.skus)[number]) => `${name} · ${gpu.count} × ${gpu.model} · ${allowed_regions.join(", ")}`;
  return { ...field, kind: "select", options: known.skus.map((sku) => ({ value: sku.name, label: label(sku) })) };
}

function Register() {
  const navigate = useNavigate();
  const skus = useQuery({ ...skusOfNodesQuery, enabled: useMay()("see_skus") });
  return (
    <Action
      spec={{
        id: "register-node",
        primary: true,
        label: "Register…",
        title: "Register a node",
        consequences: <p>The machine is known from then on. Its page gives the one command that sets it up; nothing is rented on it before its agent has enrolled.</p>,
        fields: [
          { name: "host", label: "Host", required: true, maxLength: 253, help: "Its name or address, as tenants reach it by SSH." },
          { name: "port", label: "SSH port", kind: "number", required: true, initial: "22", min: 1, max: 65_535 },
          skuField(skus.data),
          { name: "region_code", label: "Region", required: true, maxLength: 64, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*" },
          { name: "gpus_total", label: "GPUs", kind: "number", required: true, min: 1, max: 64 },
          { name: "ssh_username", label: "SSH user of the operators", required: true, maxLength: 32 },
          { name: "ssh_public_key", label: "SSH public key of the operators", required: true, maxLength: 8192 },
          { name: "name", label: "Name", maxLength: 63 },
          {
            name: "onboarding_mode",
            label: "Onboarding",
            kind: "select",
            required: true,
            initial: "manual",
            options: [
              { value: "manual", label: "by a person" },
              { value: "maas", label: "by MAAS" },
            ],
          },
        ],
        command: (values) =>
          gpuctl(
            "nodes", "create", [values["host"]?.trim() || "HOST"], ["--port", values["port"]], ["--sku", values["sku"]], ["--region", values["region_code"]],
            ["--gpus", values["gpus_total"]], ["--ssh-user", values["ssh_username"]], ["--ssh-public-key", "KEY.pub"], ["--onboarding", values["onboarding_mode"]],
            ["--name", values["name"]],
          ),
        send: (values, key) => {
          const text = (name: string) => values[name]?.trim() ?? "";
          const body: Schemas["NewNode"] = {
            host: text("host"),
            port: Number(values["port"]),
            sku: text("sku"),
            region_code: text("region_code"),
            gpus_total: Number(values["gpus_total"]),
            ssh_username: text("ssh_username"),
            ssh_public_key: text("ssh_public_key"),
            onboarding_mode: text("onboarding_mode") as Schemas["OnboardingMode"],
            ...(text("name") ? { name: text("name") } : {}),
          };
          return dataOf(api.POST("/api/v1/admin/nodes", { params: keyed(key), body }));
        },
        refreshes: ["nodes"],
        done: (node) => void navigate({ to: "/nodes/$id", params: { id: node.id } }),
      }}
    />
  );
}
