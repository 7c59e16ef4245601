// What has happened to a node, in one order of time: its tenants, findings, repairs, resets, validations, holds and the tasks of its own.
import type { Schemas } from "../api/client.ts";
import { shortId } from "../format/text.ts";
import { Card } from "../ui/layout.tsx";
import { State } from "../ui/state.tsx";
import { GrowingTable } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { FullTime } from "../ui/time.tsx";

type Node = Schemas["Node"];
type Tenant = Pick<Schemas["Allocation"], "id" | "name" | "user_id" | "gpu_count" | "active_at" | "released_at">;
type Outcome = Schemas["NodeTaskOutcome"];

export interface TimelineEntry {
  at: string;
  what: string;
  state: string;
  note: string;
}

type Remembered = Pick<Node, "created_at" | "state" | "state_entered_at" | "state_reason" | "health" | "repair" | "gpu_resets" | "reimage" | "validation" | "quarantine_holds">;

/** All that the node remembers with its time, the newest first. */
export function timelineOf(node: Remembered, ended: readonly Outcome[], tenants: readonly Tenant[] = []): TimelineEntry[] {
  const gpu = (uuid: string | null | undefined) => (uuid ? ` of GPU ${shortId(uuid)}` : "");
  const entries: TimelineEntry[] = [
    { at: node.created_at, what: "Registered", state: "registered", note: "" },
    ...(node.state === "registered" ? [] : [{ at: node.state_entered_at, what: "State of the node", state: node.state, note: node.state_reason.message }]),
    ...node.health.findings.flatMap(({ opened_at, cleared_at, probe, code, gpu_uuid, meaning, cleared_reason }): TimelineEntry[] => {
      const what = `Finding ${probe} ${code}${gpu(gpu_uuid)}`;
      return [{ at: opened_at, what, state: "found", note: meaning }, ...(cleared_at ? [{ at: cleared_at, what, state: "cleared", note: cleared_reason ?? "" }] : [])];
    }),
    ...node.quarantine_holds.map(({ since_at, code, message, author }) => ({ at: since_at, what: `Held in quarantine by ${author}`, state: code, note: message })),
    ...node.gpu_resets.map(({ begun_at, gpu_uuid, phase, error }) => ({ at: begun_at, what: `Reset${gpu(gpu_uuid)}`, state: phase, note: error ?? "" })),
    ...(node.repair ? [{ at: node.repair.begun_at, what: "Repair by a reboot", state: node.repair.phase, note: `attempts within a day: ${node.repair.attempts}` }] : []),
    ...(node.reimage ? [{ at: node.reimage.ordered_at, what: "Reimage", state: node.reimage.stage, note: "" }] : []),
    ...(node.validation ? [{ at: node.validation.ended_at, what: `Validation, ${node.validation.level}`, state: node.validation.passed ? "passed" : "failed", note: node.validation.shortfalls.join("; ") }] : []),
    ...tenants.flatMap(({ id, name, user_id, gpu_count, active_at, released_at }): TimelineEntry[] => {
      const what = `Tenant ${user_id}, allocation ${name ?? shortId(id)}`;
      const note = gpu_count === 1 ? "1 GPU" : `${gpu_count} GPUs`;
      return [...(active_at ? [{ at: active_at, what, state: "active", note }] : []), ...(released_at ? [{ at: released_at, what, state: "released", note }] : [])];
    }),
    ...ended
      .filter(({ task_id }) => task_id !== node.validation?.task_id)
      .map(({ ended_at, type, succeeded, error }) => ({ at: ended_at, what: `Task ${type}`, state: succeeded ? "succeeded" : "failed", note: error?.message ?? "" })),
  ];
  return entries.sort((a, b) => b.at.localeCompare(a.at));
}

export function NodeTimeline({ of: node, ended, tenants }: { of: Remembered; ended: readonly Outcome[]; tenants: readonly Tenant[] }) {
  return (
    <Card title="Timeline">
      <GrowingTable
        label="Timeline"
        rows={timelineOf(node, ended, tenants).map((entry, index) => ({ ...entry, key: `${index}:${entry.at}` }))}
        keyOf={({ key }) => key}
        none={null}
        columns={[
          { title: "At", cell: ({ at }) => <FullTime at={at} /> },
          { title: "What", cell: ({ what }) => <Plain>{what}</Plain> },
          { title: "State", cell: ({ state }) => <State of={state} /> },
          { title: "Note", cell: ({ note }) => <Plain>{note}</Plain> },
        ]}
      />
    </Card>
  );
}
