// What the health probes of a node found.
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { count, gpuctl, readable } from "../format/text.ts";
import { Action, REASON, type ActionSpec } from "../ui/action.tsx";
import { Card } from "../ui/layout.tsx";
import { State } from "../ui/state.tsx";
import { Table } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { resetGpu } from "./node-actions.ts";

type Finding = Schemas["NodeFinding"];

export function NodeFindings({ of: { id, health } }: { of: Schemas["Node"] }) {
  return (
    <Card title="Findings" actions={<State of={health.status} />}>
      <Table
        label="Findings"
        rows={health.findings}
        keyOf={(finding) => finding.id}
        none={<p>Nothing was found.</p>}
        columns={[
          { title: "Finding", cell: (finding) => `${finding.probe} ${finding.code}` },
          { title: "Meaning", cell: (finding) => <Plain>{finding.meaning}</Plain> },
          { title: "Latest", cell: (finding) => <Plain>{finding.detail}</Plain> },
          { title: "Follows", cell: (finding) => finding.classes.map(readable).join(", ") || "nothing" },
          { title: "Times", number: true, cell: (finding) => count(finding.count) },
          { title: "Last", cell: (finding) => <When at={finding.last_at} /> },
          { title: "Actions", cell: (finding) => <FindingActions node={id} of={finding} /> },
        ]}
      />
    </Card>
  );
}

function FindingActions({ node, of: finding }: { node: string; of: Finding }) {
  if (finding.cleared_at) return <State of="cleared" />;
  return (
    <span className="row-actions">
      <Action quiet spec={clearFinding(node, finding)} />
      {finding.gpu_uuid && <Action quiet spec={resetGpu(node, finding.gpu_uuid)} />}
    </span>
  );
}

export function clearFinding(node: string, { id }: Finding): ActionSpec<unknown> {
  return {
    id: `clear-finding:${id}`,
    label: "Clear…",
    title: "Clear this finding",
    consequences: <p>Nothing follows from it any more. It opens again when it occurs again.</p>,
    fields: [REASON],
    command: (values) => gpuctl("nodes", "clear-finding", node, id, ["--reason", values["reason"]]),
    send: (values, key) =>
      dataOf(
        api.POST("/api/v1/admin/nodes/{id}/findings/{finding_id}/clear", {
          params: { path: { id: node, finding_id: id }, ...keyed(key) },
          body: { reason: values["reason"] ?? "" },
        }),
      ),
    refreshes: ["node", "nodes", "findings"],
  };
}
