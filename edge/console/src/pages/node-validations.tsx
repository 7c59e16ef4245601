// How a machine has measured, validation by validation.
import type { Schemas } from "../api/client.ts";
import { count, readable } from "../format/text.ts";
import { Card } from "../ui/layout.tsx";
import { State } from "../ui/state.tsx";
import { Table } from "../ui/table.tsx";
import { Labels, Plain } from "../ui/text.tsx";
import { FullTime } from "../ui/time.tsx";

type Node = Schemas["Node"];
type Outcome = Schemas["NodeTaskOutcome"];

export interface ValidationResult {
  task_id: string;
  ended_at: string;
  level: string | null;
  /** Null: the node has a newer validation, so that only what its agent reported is known, and not how the SKU judged it. */
  passed: boolean | null;
  succeeded: boolean;
  measurements: Readonly<Record<string, number>>;
  problems: readonly string[];
}

const TASK = "node.validate";

function measured(output: Outcome["output"]): Record<string, number> {
  const { measurements } = output ?? {};
  if (typeof measurements !== "object" || measurements === null) return {};
  return Object.fromEntries(Object.entries(measurements).filter((entry): entry is [string, number] => typeof entry[1] === "number"));
}

/** The validations that the node remembers, the newest first. The last one with load is judged by its SKU. */
export function validationsOf({ validation }: Pick<Node, "validation">, ended: readonly Outcome[]): ValidationResult[] {
  const reported = ended
    .filter(({ type, task_id }) => type === TASK && task_id !== validation?.task_id)
    .map(({ task_id, ended_at, succeeded, output, error }): ValidationResult => {
      const level = output?.["level"];
      return { task_id, ended_at, level: typeof level === "string" ? level : null, passed: null, succeeded, measurements: measured(output), problems: error ? [error.message] : [] };
    });
  const judged: ValidationResult[] = validation
    ? [
        {
          task_id: validation.task_id,
          ended_at: validation.ended_at,
          level: validation.level,
          passed: validation.passed,
          succeeded: true,
          measurements: validation.measurements,
          problems: [...validation.shortfalls, ...Object.entries(validation.not_tested).map(([test, why]) => `${test} was not tested: ${why}`)],
        },
      ]
    : [];
  return [...judged, ...reported].sort((a, b) => b.ended_at.localeCompare(a.ended_at));
}

function resultOf({ passed, succeeded, level }: ValidationResult): string {
  if (passed !== null) return passed ? "passed" : "failed";
  if (!succeeded) return "failed";
  return level ? "measured" : "succeeded";
}

export function NodeValidations({ of: node, ended }: { of: Pick<Node, "validation">; ended: readonly Outcome[] }) {
  const results = validationsOf(node, ended);
  if (results.length === 0) return null;
  return (
    <Card title="Validations">
      <Table
        label="Validations"
        rows={results}
        keyOf={(result) => result.task_id}
        none={null}
        columns={[
          { title: "Ended", cell: ({ ended_at }) => <FullTime at={ended_at} /> },
          { title: "Level", cell: ({ level }) => (level ? readable(level) : "without load") },
          { title: "Result", cell: (result) => <State of={resultOf(result)} /> },
          { title: "Measured", cell: ({ measurements }) => <Labels of={Object.fromEntries(Object.entries(measurements).map(([name, value]) => [name, count(value)]))} /> },
          { title: "Because", cell: ({ problems }) => <Plain>{problems.join("; ")}</Plain> },
        ]}
      />
    </Card>
  );
}
