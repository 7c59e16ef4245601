// The machine of a node as its agent reports it, line by line beside what its SKU promises, and its GPUs.
import { Link } from "@tanstack/react-router";
import type { Schemas } from "../api/client.ts";
import { mebibytes, shortId } from "../format/text.ts";
import { Action } from "../ui/action.tsx";
import { Card } from "../ui/layout.tsx";
import { State } from "../ui/state.tsx";
import { Table } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { cellsOf } from "./gpu-map.tsx";
import { isGone, resetGpu } from "./node-actions.ts";

type Node = Schemas["Node"];

export function Machine({ of: node }: { of: Node }) {
  const cells = new Map(cellsOf(node).map((cell) => [cell.uuid, cell]));
  return (
    <>
      <Card title="Machine and SKU">
        <Table
          label="Machine and SKU"
          rows={node.hardware}
          keyOf={(line) => line.item}
          none={<p>The SKU is not known.</p>}
          columns={[
            { title: "Part", cell: (line) => line.item },
            { title: "Expected", cell: (line) => <Plain>{line.expected}</Plain> },
            { title: "Found", cell: (line) => <Plain>{line.found}</Plain> },
            { title: "Compared", cell: (line) => <State of={line.is_enough == null ? "not known" : line.is_enough ? "ok" : "not enough"} /> },
          ]}
        />
      </Card>
      <Card title="GPUs">
        <Table
          label="GPUs"
          rows={node.inventory?.gpus ?? []}
          keyOf={(gpu) => gpu.uuid}
          none={<p>The agent has not reported any GPU.</p>}
          columns={[
            { title: "GPU", number: true, cell: (gpu) => gpu.index },
            { title: "Model", cell: (gpu) => `${gpu.model}, ${mebibytes(gpu.memory_mib)}` },
            { title: "UUID", cell: (gpu) => <code title={gpu.uuid}>{shortId(gpu.uuid)}</code> },
            { title: "Use", cell: (gpu) => <State of={cells.get(gpu.uuid)?.use ?? "withheld"} /> },
            {
              title: "Allocation",
              cell: (gpu) =>
                gpu.allocation_id && (
                  <Link to="/allocations/$id" params={{ id: gpu.allocation_id }}>
                    <code title={gpu.allocation_id}>{shortId(gpu.allocation_id)}</code>
                  </Link>
                ),
            },
            { title: "Actions", cell: (gpu) => (gpu.allocation_id || isGone(node) ? "" : <Action quiet spec={resetGpu(node.id, gpu.uuid)} />) },
          ]}
        />
      </Card>
    </>
  );
}
