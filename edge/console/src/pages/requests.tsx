// One request by its correlation id: what it changed, who sent it, and where its log lines are.
import { keepPreviousData, queryOptions, useQueries, useQuery, type UseQueryResult } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { api, dataOf, type Schemas } from "../api/client.ts";
import { ApiFailure } from "../api/failure.ts";
import { POLL_MS, pollEvery } from "../api/query-client.ts";
import { count, gpuctl, readable, shellQuoted, shortId } from "../format/text.ts";
import { ROLE_FOR, useMay } from "../session/me.ts";
import { Guard } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Card, Facts, Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Problem } from "../ui/problem.tsx";
import { State } from "../ui/state.tsx";
import { GrowingTable, PagedTable } from "../ui/table.tsx";
import { CommandLine, Copyable, Plain } from "../ui/text.tsx";
import { FullTime } from "../ui/time.tsx";
import { useAddress } from "../ui/use-address.ts";

type Report = Schemas["EntityReport"];

/** Of at most so many entities is the history read: each is a request. */
const MOST_ENTITIES = 20;

export default function RequestsPage() {
  const [address, set] = useAddress();
  const id = address["correlation_id"];
  return (
    <Guard needs="read_audit">
      <Head title="Requests" />
      <Filters of={[{ name: "correlation_id", label: "Correlation id", hint: "of an answer, or a log line", wide: true }]} address={address} set={set} />
      {id ? (
        <OneRequest key={id} id={id} page={address["page"]} open={(page) => set({ page })} />
      ) : (
        <p className="none">Each answer of the API has a correlation id, and each error shows it. Paste one to see what the request did.</p>
      )}
    </Guard>
  );
}

interface OneRequestProps {
  id: string;
  page: string | undefined;
  open: (page: string | undefined) => void;
}

function OneRequest({ id, page, open }: OneRequestProps) {
  const mayOpen = useMay()("operate_runtime");
  const entries = useQuery({
    queryKey: ["audit", { correlation_id: id, page }],
    queryFn: () => dataOf(api.GET("/api/v1/admin/audit-log", { params: { query: { correlation_id: id, ...(page ? { page_token: page } : {}) } } })),
    placeholderData: keepPreviousData,
    // The log has no index by this id, so that it is searched where it is asked for, and not in an interval.
    staleTime: Infinity,
  });
  return (
    <>
      <Card title="Audit log" actions={<Age query={entries} polled />}>
        <PagedTable
          label="Audit log"
          query={entries}
          page={page}
          open={open}
          keyOf={(entry) => `${entry.chain.epoch}:${entry.chain.shard}:${entry.chain.seq}`}
          none={<p>No audited action has this correlation id. A request that was refused, or only read, changes nothing: its log lines say more.</p>}
          columns={[
            { title: "At", cell: (entry) => <FullTime at={entry.at} /> },
            { title: "Who", cell: (entry) => <Plain>{entry.actor}</Plain> },
            { title: "Action", cell: (entry) => <code>{entry.action}</code> },
            { title: "Target", cell: ({ target }) => <Entity of={target} /> },
          ]}
        />
        <CommandLine line={gpuctl("audit", "list", ["--correlation-id", id])} />
      </Card>
      {mayOpen ? <Commits id={id} targets={targetsOf(entries.data?.items ?? [])} /> : <p className="soft page-note">To see its commits you need the role {ROLE_FOR.operate_runtime}.</p>}
      <LogLines id={id} />
    </>
  );
}

function Entity({ of: { kind, id } }: { of: Schemas["AuditTarget"] }) {
  const name = (
    <>
      {readable(kind)} <code title={id}>{shortId(id)}</code>
    </>
  );
  if (!useMay()("operate_runtime")) return name;
  return (
    <Link to="/entities/$kind/$id" params={{ kind, id }}>
      {name}
    </Link>
  );
}

/** Each entity once. */
export function targetsOf(entries: readonly Pick<Schemas["AuditEntry"], "target">[]): Schemas["AuditTarget"][] {
  return [...new Map(entries.map(({ target }) => [`${target.kind}:${target.id}`, target])).values()];
}

export interface Commit extends Pick<Schemas["Transition"], "version" | "command" | "to_state" | "why" | "actor" | "at"> {
  entity: Schemas["AuditTarget"];
}

/** The commits of a request, in the order of their time. */
export function commitsOf(reports: readonly Pick<Report, "entity" | "history">[], correlation_id: string): Commit[] {
  return reports
    .flatMap(({ entity: { kind, id }, history }) => history.filter((transition) => transition.correlation_id === correlation_id).map((transition) => ({ ...transition, entity: { kind, id } })))
    .sort((a, b) => a.at.localeCompare(b.at) || a.version - b.version);
}

const entityQuery = ({ kind, id }: Schemas["AuditTarget"]) =>
  queryOptions({
    queryKey: ["entity", kind, id],
    queryFn: () => dataOf(api.GET("/api/v1/admin/runtime/entities/{kind}/{id}", { params: { path: { kind, id } as never } })),
    refetchInterval: pollEvery(POLL_MS),
  });

/** An entity that has ended long ago is removed, with its history. */
function isGone(error: Error | null): boolean {
  return error instanceof ApiFailure && error.status === 404;
}

const together = (results: UseQueryResult<Report>[]) => ({
  reports: results.flatMap(({ data }) => (data ? [data] : [])),
  error: results.find(({ error }) => error !== null && !isGone(error))?.error ?? null,
  gone: results.filter(({ error }) => isGone(error)).length,
  isLoading: results.some(({ isLoading }) => isLoading),
});

function Commits({ id, targets }: { id: string; targets: readonly Schemas["AuditTarget"][] }) {
  const { reports, error, gone, isLoading } = useQueries({ queries: targets.slice(0, MOST_ENTITIES).map(entityQuery), combine: together });
  if (targets.length === 0) return null;
  return (
    <Card title="Commits">
      <p className="soft">What the entities above have committed for this request, and for what followed from it under its correlation id.</p>
      {error && <Problem error={error} />}
      {isLoading ? (
        <p className="loading" role="status">
          Loading…
        </p>
      ) : (
        <GrowingTable
          label="Commits"
          rows={commitsOf(reports, id)}
          keyOf={({ entity, version }) => `${entity.kind}:${entity.id}:${version}`}
          none={<p>None is among the newest transitions of these entities. Their pages have the rest.</p>}
          columns={[
            { title: "At", cell: ({ at }) => <FullTime at={at} /> },
            { title: "Entity", cell: ({ entity }) => <Entity of={entity} /> },
            { title: "Version", number: true, cell: ({ version }) => count(version) },
            { title: "Command", cell: ({ command }) => <code>{command}</code> },
            { title: "To", cell: ({ to_state }) => <State of={to_state} /> },
            { title: "Why", cell: ({ why }) => <Plain>{why}</Plain> },
          ]}
        />
      )}
      {gone > 0 && <p className="soft">The history of {count(gone)} {gone === 1 ? "entity is" : "entities is"} not there any more.</p>}
      {targets.length > MOST_ENTITIES && <p className="soft">Only the commits of the first {count(MOST_ENTITIES)} entities are read.</p>}
    </Card>
  );
}

/** The service does not read logs: these lines find them. */
function LogLines({ id }: { id: string }) {
  return (
    <Card title="Log lines">
      <Facts
        of={[
          ["On a host of the service", <Copyable key="h" text={`journalctl --unit gpuaas --output cat | grep --fixed-strings -e ${shellQuoted(id)}`} label="command for a host of the service" />],
          ["In the log store of nodes", <Copyable key="s" text={`{service="node-agent"} | json | correlation_id=${JSON.stringify(id)}`} label="query of the log store" />],
        ]}
      />
    </Card>
  );
}
