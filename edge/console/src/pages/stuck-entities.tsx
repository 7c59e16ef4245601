// What does not go on, grouped by what it waits for.
import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useState } from "react";
import { api, dataOf, type Schemas } from "../api/client.ts";
import { count, shortId, readable } from "../format/text.ts";
import { useMay, type Permission } from "../session/me.ts";
import { Action, Guard, RoleNeeded } from "../ui/action.tsx";
import { Card, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { Runbook } from "../ui/runbook.tsx";
import { State } from "../ui/state.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { Table } from "../ui/table.tsx";
import { useAddress, type Address } from "../ui/use-address.ts";
import { MemberTroubles, troublesOf } from "./member-troubles.tsx";
import { paymentReviewActions } from "./payment-review-actions.ts";
import { pageOf, remediesOf, TREE } from "./remedies.ts";
import { RestartEntity } from "./restart-entity.tsx";
import { overdueQuery, silentMembers, treeQuery } from "./supervision-tree.tsx";

type Entity = Schemas["EntityNode"];

/** Of overdue entities of these kinds; the rules of deploy/alerts name the same. */
const RUNBOOKS: Readonly<Record<string, string>> = { node: "ops.node.onboarding", processor_event: "ops.webhook.outage" };
/** Of all others that are overdue, and of those that are parked. */
const RUNBOOK = "ops.provisioning.stuck";

/** The runbook that the alert about such an entity has. */
export function runbookOf({ kind, status }: Pick<Entity, "kind" | "status">): string {
  return status === "parked" ? RUNBOOK : (RUNBOOKS[kind] ?? RUNBOOK);
}

export interface StuckCause {
  cause: string;
  runbook: string;
  entities: Entity[];
}

/** One cause with all that have it: the most frequent first. */
export function byCause(entities: readonly Entity[]): StuckCause[] {
  const causes = new Map<string, StuckCause>();
  for (const entity of entities) {
    const why = entity.status === "parked" ? (entity.last_error ?? "it failed too often") : (entity.waits_for ?? "it is over its deadline");
    const cause = `${readable(entity.kind)}: ${why}`;
    const runbook = runbookOf(entity);
    const key = `${runbook} ${cause}`;
    const found = causes.get(key) ?? { cause, runbook, entities: [] };
    found.entities.push(entity);
    causes.set(key, found);
  }
  return [...causes.values()].sort((a, b) => b.entities.length - a.entities.length || a.cause.localeCompare(b.cause));
}

/** Each entity once, though it is in both lists. */
export function merged(...lists: (readonly Entity[])[]): Entity[] {
  return [...new Map(lists.flat().map((entity) => [`${entity.kind}:${entity.id}`, entity])).values()];
}

export default function StuckPage() {
  const overdue = useQuery(overdueQuery);
  const parked = useQuery(treeQuery({ parked: "true" }));
  return (
    <Guard needs="operate_runtime">
      <Head title="Stuck" age={<Age query={overdue} polled />} />
      <p className="soft page-note">Overdue: a wait is over its deadline. Parked: an entity has failed too often and is not tried any more. Members: a worker was given up, a consumer lags, or a clock is off. Each cause has a runbook of the book, which says what it means and what to do.</p>
      <Loaded query={overdue}>
        {(late) => (
          <Loaded query={parked}>
            {(failed) => {
              const causes = byCause(merged(late.entities, failed.entities));
              const ofMembers = troublesOf(late.members);
              const silent = new Set([...late.silent, ...failed.silent]).size;
              return (
                <>
                  {silent > 0 && (
                    <p className="banner" data-tone="bad">
                      <span>{silentMembers(silent)}</span>
                    </p>
                  )}
                  {late.truncated && <More text="More are overdue than are shown here" filter={{ overdue: "true" }} />}
                  {failed.truncated && <More text="More are parked than are shown here" filter={{ parked: "true" }} />}
                  {causes.length + ofMembers.length === 0 && <p className="none">Nothing is stuck.</p>}
                  <MemberTroubles of={ofMembers} />
                  {causes.map((cause) => (
                    <Card
                      key={`${cause.runbook} ${cause.cause}`}
                      title={`${count(cause.entities.length)} × ${cause.cause}`}
                      actions={
                        <span className="soft">
                          Runbook <Runbook id={cause.runbook} />
                        </span>
                      }
                    >
                      <Entities rows={cause.entities} />
                    </Card>
                  ))}
                </>
              );
            }}
          </Loaded>
        )}
      </Loaded>
    </Guard>
  );
}

/** As many entities of one cause are shown. */
const SHOWN = 100;

/** What is not shown, and the filter of the tree that has it. */
function More({ text, filter }: { text: string; filter: Address }) {
  return (
    <p className="soft">
      {text}:{" "}
      <Link to="/tree" search={filter as never}>
        see them in the tree
      </Link>
    </p>
  );
}

/** The filter of the tree that has the entities of one cause, and perhaps others. The tree lists what is parked without regard to other filters. */
export function filterOf(rows: readonly Entity[]): Address {
  const [first] = rows;
  if (!first || first.status === "parked") return { parked: "true" };
  const { kind, state } = first;
  return { kind, ...(state && rows.every((row) => row.state === state) ? { state } : {}), overdue: "true" };
}

function Entities({ rows }: { rows: readonly Entity[] }) {
  const [address, set] = useAddress();
  // One cause is of one kind: its remedies need one role.
  const remedies = rows.map(remediesOf).find((found) => found !== null);
  return (
    <>
      {remedies && <RoleNeeded needs={remedies.needs} to={remedies.to} />}
      <Table
        label="Entities"
        rows={rows}
        most={SHOWN}
        order={{ of: address["sort"], set: (sort) => set({ sort }, { inPlace: true }) }}
        keyOf={(row) => row.id}
        none={null}
        columns={[
          {
            title: "Entity",
            cell: (row) => (
              <Link to="/entities/$kind/$id" params={{ kind: row.kind, id: row.id }}>
                <code title={row.id}>{shortId(row.id)}</code>
              </Link>
            ),
          },
          { title: "State", by: (row) => row.state ?? row.status, cell: (row) => <State of={row.state ?? row.status} overdue={row.overdue} /> },
          { title: "Since", by: (row) => row.since, cell: (row) => <When at={row.since} /> },
          { title: "Deadline", by: (row) => row.deadline_at, cell: (row) => <When at={row.deadline_at} /> },
          { title: "Last error", by: (row) => row.last_error, cell: (row) => <Plain>{row.last_error}</Plain> },
          { title: "Actions", cell: (row) => <Remedies of={row} /> },
        ]}
      />
      {rows.length > SHOWN && <More text={`${count(rows.length - SHOWN)} more have this cause`} filter={filterOf(rows)} />}
    </>
  );
}

/** What ends its wait, then its restart, then the page that has the rest. */
function Remedies({ of: row }: { of: Entity }) {
  const remedies = remediesOf(row);
  const page = pageOf(row.kind);
  const may = useMay();
  return (
    <span className="row-actions">
      {remedies?.specs.map((spec) => (
        <Action key={spec.id} quiet needs={remedies.needs} spec={spec} />
      ))}
      {remedies?.isPayment && may(remedies.needs) && <PaymentReview id={row.id} needs={remedies.needs} />}
      <RestartEntity quiet kind={row.kind} id={row.id} />
      {page && (!page.needs || may(page.needs)) && (
        <Link to={page.to} params={{ id: row.id } as never}>
          {page.label}
        </Link>
      )}
    </span>
  );
}

/** The payment is read where its decision is wanted: each read counts against the caller's quota of requests about money. */
function PaymentReview({ id, needs }: { id: string; needs: Permission }) {
  const [isWanted, setWanted] = useState(false);
  const payment = useQuery({
    queryKey: ["payment", id],
    queryFn: () => dataOf(api.GET("/api/v1/billing/payments/{id}", { params: { path: { id } } })),
    enabled: isWanted,
  });
  if (!isWanted) {
    return (
      <button type="button" className="quiet" onClick={() => setWanted(true)}>
        Decide
      </button>
    );
  }
  return (
    <Loaded query={payment}>
      {(found) => (
        <>
          <Plain>{found.reason}</Plain>
          {paymentReviewActions(found).map((spec) => (
            <Action key={spec.id} quiet needs={needs} spec={{ ...spec, refreshes: [...spec.refreshes, ...TREE] }} />
          ))}
        </>
      )}
    </Loaded>
  );
}
