// What is wrong with members of the cluster: workers that were given up, consumers that lag, clocks that are off.
import { Link } from "@tanstack/react-router";
import type { Schemas } from "../api/client.ts";
import { count } from "../format/text.ts";
import { Card } from "../ui/layout.tsx";
import { Runbook } from "../ui/runbook.tsx";
import { Plain } from "../ui/text.tsx";
import { Table } from "../ui/table.tsx";
import { RestartWorker } from "./restart-worker.tsx";

type Member = Pick<Schemas["MemberNode"], "id" | "name" | "clock_offset_ms" | "workers">;
type Worker = Schemas["WorkerNode"];

/** As many events may wait at a consumer: the limit of the alert GPUAASConsumerLag. */
const MOST_WAITING = 1000;
/** A clock may be off by as much: the limit of the alert GPUAASMemberClockOff. */
const MOST_OFF_MS = 2000;

interface MemberTrouble {
  member: Member;
  /** The worker that has it; none where it is the process as a whole. */
  worker: Worker | null;
  seen: string;
}

export interface MemberCause {
  cause: string;
  /** What ends it where no button does. */
  advice: string;
  runbook: string;
  troubles: MemberTrouble[];
}

/** One cause with each member that has it: parked workers, then consumers, then clocks. */
export function troublesOf(members: readonly Member[]): MemberCause[] {
  const causes = new Map<string, MemberCause>();
  const add = (cause: Omit<MemberCause, "troubles">, trouble: MemberTrouble) => {
    const found = causes.get(cause.cause) ?? { ...cause, troubles: [] };
    found.troubles.push(trouble);
    causes.set(cause.cause, found);
  };
  const workers = members.flatMap((member) => member.workers.map((worker) => ({ member, worker })));
  for (const { member, worker } of workers.filter(({ worker }) => worker.state === "parked")) {
    add(parked(worker), { member, worker, seen: `parked after ${count(worker.restarts)} restarts` });
  }
  for (const { member, worker } of workers.filter(({ worker }) => lagOf(worker) > MOST_WAITING)) {
    add(lagging(worker), { member, worker, seen: `${count(lagOf(worker))} events wait, ${count(worker.queue?.under_way ?? 0)} are being processed` });
  }
  for (const member of members) {
    const offset = member.clock_offset_ms ?? 0;
    if (Math.abs(offset) > MOST_OFF_MS) add(CLOCK, { member, worker: null, seen: `${count(Math.abs(offset))} ms ${offset > 0 ? "ahead" : "behind"}` });
  }
  return [...causes.values()];
}

/** How many members have a trouble of these. */
export function troubledMembers(causes: readonly MemberCause[]): number {
  return new Set(causes.flatMap(({ troubles }) => troubles.map(({ member }) => member.id))).size;
}

/** The lag of a consumer. The queues of other workers are bounded, and this one is not: JetStream has what waits. */
function lagOf({ queue }: Worker): number {
  return queue && queue.bound == null ? queue.waiting : 0;
}

const parked = ({ name, what, last_error }: Worker): Omit<MemberCause, "troubles"> => ({
  cause: `worker ${name} (${what}) is parked: ${last_error ?? "it ended too often"}`,
  advice: "It ended too often and is not restarted by itself. Repair what it names, then restart it.",
  runbook: "ops.api.degradation",
});

const lagging = ({ name, what }: Worker): Omit<MemberCause, "troubles"> => ({
  cause: `worker ${name} (${what}) lags: events wait for their effect`,
  advice: "No event is lost. All members that have the worker share one lag. A worker that hangs goes on when it is restarted; a stream or a consumer that stands still is repaired at NATS.",
  runbook: "ops.bus.backlog",
});

const CLOCK: Omit<MemberCause, "troubles"> = {
  cause: "member: its clock differs from Postgres' clock",
  advice: "What it decides by time is early or late by as much. Repair the time service of its machine (timedatectl, chronyc tracking). Where all members are off by the same, it is Postgres' clock.",
  runbook: "ops.api.degradation",
};

export function MemberTroubles({ of: causes }: { of: readonly MemberCause[] }) {
  return causes.map(({ cause, advice, runbook, troubles }) => (
    <Card
      key={cause}
      title={`${count(troubles.length)} × ${cause}`}
      actions={
        <span className="soft">
          Runbook <Runbook id={runbook} />
        </span>
      }
    >
      <p className="soft">{advice}</p>
      <Table
        label="Members"
        rows={troubles}
        keyOf={({ member, worker }) => `${member.id}:${worker?.name ?? ""}`}
        none={null}
        columns={[
          { title: "Member", cell: ({ member }) => <Plain>{member.name}</Plain> },
          { title: "Seen", cell: ({ seen }) => seen },
          { title: "Last error", cell: ({ worker }) => <Plain>{worker?.last_error}</Plain> },
          {
            title: "Actions",
            cell: ({ member, worker }) => (
              <span className="row-actions">
                {worker?.restartable && <RestartWorker member={member} worker={worker.name} />}
                <Link to="/tree">In the tree</Link>
              </span>
            ),
          },
        ]}
      />
    </Card>
  ));
}
