// Health: the findings that are open in the fleet, and the rules by which findings are judged, with the administrators' overrides.
import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { POLL_MS, pollEvery } from "../api/query-client.ts";
import { allNodes } from "../api/queries.ts";
import { count, gpuctl, readable } from "../format/text.ts";
import { Action, Guard, REASON, type ActionSpec } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Card, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { GrowingTable, Table } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { useAddress, type Address } from "../ui/use-address.ts";
import { clearFinding } from "./node-findings.tsx";

type Rule = Schemas["HealthRule"];
type Override = Schemas["HealthRuleOverride"];

const REFRESHES = ["health-rules", "nodes", "node", "findings"];

export default function HealthRulesPage() {
  const [address, set] = useAddress();
  const rules = useQuery({ queryKey: ["health-rules"], queryFn: () => dataOf(api.GET("/api/v1/admin/health-rules")), refetchInterval: pollEvery(60_000) });
  return (
    <Guard needs="manage_nodes">
      <Head title="Health" age={<Age query={rules} />}>
        <Action spec={write()} />
      </Head>
      <OpenFindings />
      <Loaded query={rules}>
        {({ items, overrides }) => (
          <>
            <Overrides rows={overrides} />
            <Card title={`Rules: ${count(items.length)}`}>
              <Filters
                of={[
                  { name: "probe", label: "Probe", options: [...new Set(items.map(({ probe }) => probe))].sort() },
                  { name: "class", label: "What follows", options: CLASSES },
                ]}
                address={address}
                set={set}
              />
              <Table
                label="Rules"
                rows={items.filter((rule) => matches(rule, address))}
                keyOf={(rule) => `${rule.probe}/${rule.code}`}
                none={<p>No rule matches.</p>}
                columns={[
                  { title: "Finding", cell: (rule) => <code>{`${rule.probe}/${rule.code}`}</code> },
                  { title: "Meaning", cell: (rule) => rule.meaning },
                  { title: "Of", cell: (rule) => readable(rule.scope) },
                  { title: "What follows", cell: (rule) => rule.classes.map(readable).join(", ") || "nothing" },
                  { title: "Cause", cell: (rule) => readable(rule.cause) },
                  { title: "Repaired by", cell: (rule) => readable(rule.repair) },
                  { title: "Overridden by", cell: (rule) => (rule.overridden_by ? <code>{rule.overridden_by}</code> : "") },
                  { title: "Actions", cell: (rule) => <Action quiet spec={write(rule)} /> },
                ]}
              />
            </Card>
          </>
        )}
      </Loaded>
    </Guard>
  );
}

const CLASSES: Schemas["FindingClass"][] = ["prevent_allocation", "evacuate", "billing_credit", "quarantine", "warn"];

function matches(rule: Rule, address: Address): boolean {
  const { probe } = address;
  const wanted = address["class"];
  return (!probe || rule.probe === probe) && (!wanted || rule.classes.includes(wanted));
}

function OpenFindings() {
  const nodes = useQuery({ queryKey: ["findings"], queryFn: () => allNodes({}), refetchInterval: pollEvery(POLL_MS) });
  return (
    <Card title="Open findings" actions={<Age query={nodes} />}>
      <Loaded query={nodes}>
        {({ items, isPartial }) => (
          <>
            <GrowingTable
              label="Open findings"
              rows={items.flatMap((node) => node.health.findings.filter(({ cleared_at }) => !cleared_at).map((finding) => ({ node, finding })))}
              keyOf={({ node, finding }) => `${node.id}:${finding.id}`}
              none={<p>No finding is open.</p>}
              columns={[
                {
                  title: "Node",
                  cell: ({ node }) => (
                    <Link to="/nodes/$id" params={{ id: node.id }} className="row-link">
                      <Plain>{node.name ?? node.host}</Plain>
                    </Link>
                  ),
                },
                { title: "Finding", cell: ({ finding }) => <code>{`${finding.probe}/${finding.code}`}</code> },
                { title: "Meaning", cell: ({ finding }) => finding.meaning },
                { title: "What follows", cell: ({ finding }) => finding.classes.map(readable).join(", ") || "nothing" },
                { title: "Times", number: true, cell: ({ finding }) => count(finding.count) },
                { title: "Last", cell: ({ finding }) => <When at={finding.last_at} /> },
                { title: "Actions", cell: ({ node, finding }) => <Action quiet spec={clearFinding(node.id, finding)} /> },
              ]}
            />
            {isPartial && <p className="soft">Only the first {count(items.length)} nodes were read; the list of nodes has the others.</p>}
          </>
        )}
      </Loaded>
    </Card>
  );
}

function Overrides({ rows }: { rows: readonly Override[] }) {
  return (
    <Card title="Overrides">
      <Table
        label="Overrides"
        rows={rows}
        keyOf={(override) => override.pattern}
        none={<p>Nothing is overridden: the table below holds.</p>}
        columns={[
          { title: "Findings", cell: (override) => <code>{override.pattern}</code> },
          { title: "What follows", cell: (override) => override.classes.map(readable).join(", ") },
          { title: "Repaired by", cell: (override) => readable(override.repair) },
          { title: "Tenants read", cell: (override) => <Plain>{override.tenant_message}</Plain> },
          { title: "Reason", cell: (override) => <Plain>{override.reason}</Plain> },
          { title: "By", cell: (override) => <Plain>{override.written_by}</Plain> },
          { title: "Since", cell: (override) => <When at={override.written_at} /> },
          { title: "Actions", cell: (override) => <Action quiet spec={takeBack(override)} /> },
        ]}
      />
    </Card>
  );
}

/** An override of a rule, or of any pattern. */
function write(rule?: Rule): ActionSpec<Override> {
  const pattern = rule ? `${rule.probe}/${rule.code}` : "";
  return {
    id: `health-rule:${pattern}`,
    primary: !rule,
    label: rule ? "Override…" : "Override a rule…",
    title: rule ? `Override the rule of ${pattern}` : "Override rules",
    consequences: <p>Findings that match are judged by it from now on, those that are open included. The pattern xid/145 is for 145.fatal and the other codes below it too. The longest pattern wins; where two differ in the * alone, the one without it.</p>,
    fields: [
      { name: "pattern", label: "Findings", required: true, initial: pattern, maxLength: 64, pattern: "[a-z][a-z0-9_]*/([A-Za-z0-9._\\-]+\\*?|\\*)", help: "A probe, a slash, and a code that may end in *." },
      ...CLASSES.map((name) => ({ name, label: `Follows: ${readable(name)}`, kind: "checkbox" as const, initial: rule?.classes.includes(name) ? "yes" : "" })),
      { name: "cause", label: "Cause", kind: "select", options: optionsOf("tenant", "hardware", "software"), initial: rule && rule.cause !== "unknown" ? rule.cause : "" },
      { name: "repair", label: "Repaired by", kind: "select", options: optionsOf("none", "reset", "reboot", "operator"), initial: rule?.repair ?? "" },
      { name: "tenant_message", label: "What tenants read", maxLength: 300, initial: rule?.tenant_message ?? "", help: "Needed where tenants are evacuated or credited." },
      REASON,
    ],
    command: (values) => {
      const classes = CLASSES.filter((name) => values[name]);
      return gpuctl(
        "health-rules", "set", values["pattern"]?.trim() || "PATTERN", ...(classes.length > 0 ? classes : ["CLASS"]).map((name) => ["--class", name] as const),
        ["--cause", values["cause"]], ["--repair", values["repair"]], ["--tenant-message", values["tenant_message"]], ["--reason", values["reason"]],
      );
    },
    send: (values, key) => {
      const body: Schemas["NewHealthRule"] = {
        pattern: values["pattern"]?.trim() ?? "",
        classes: CLASSES.filter((name) => values[name] === "yes"),
        reason: values["reason"] ?? "",
        ...(values["cause"] ? { cause: values["cause"] as Schemas["FindingCause"] } : {}),
        ...(values["repair"] ? { repair: values["repair"] as Schemas["FindingRepair"] } : {}),
        ...(values["tenant_message"]?.trim() ? { tenant_message: values["tenant_message"].trim() } : {}),
      };
      return dataOf(api.POST("/api/v1/admin/health-rules", { params: keyed(key), body }));
    },
    refreshes: REFRESHES,
  };
}

function optionsOf(...values: string[]) {
  return values.map((value) => ({ value, label: readable(value) }));
}

function takeBack({ pattern }: Override): ActionSpec<unknown> {
  return {
    id: `unset-health-rule:${pattern}`,
    label: "Take back…",
    title: `Take the override of ${pattern} back`,
    consequences: <p>The table judges these findings again. Billing that the override has stopped stays stopped.</p>,
    fields: [REASON],
    command: (values) => gpuctl("health-rules", "unset", pattern, ["--reason", values["reason"]]),
    send: (values) => dataOf(api.DELETE("/api/v1/admin/health-rules", { params: { query: { pattern, reason: values["reason"] ?? "" } } })),
    refreshes: REFRESHES,
  };
}
