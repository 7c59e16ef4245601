// The audit log: who did what to what, and why.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { api, dataOf } from "../api/client.ts";
import { pollUnreported } from "../api/query-client.ts";
import { gpuctl, shortId } from "../format/text.ts";
import { useMay } from "../session/me.ts";
import { Guard } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { CommandLine, Plain } from "../ui/text.tsx";
import { FullTime } from "../ui/time.tsx";
import { PagedTable } from "../ui/table.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";

const FILTERS = ["actor", "action", "target_kind", "target_id", "correlation_id", "from", "until"] as const;

export default function AuditPage() {
  const [address, set] = useAddress();
  const mayOpen = useMay()("operate_runtime");
  const entries = useQuery({
    queryKey: ["audit", address],
    queryFn: () => dataOf(api.GET("/api/v1/admin/audit-log", { params: { query: queryOf(address, FILTERS) } })),
    placeholderData: keepPreviousData,
    // Operators are notified of each change of an entity, and so of what is audited; auditors of none.
    refetchInterval: pollUnreported(30_000),
  });
  return (
    <Guard needs="read_audit">
      <Head title="Audit log" age={<Age query={entries} polled />} />
      <Filters
        of={[
          { name: "actor", label: "Who", hint: "user:…" },
          { name: "action", label: "Action", hint: "nodes.retire" },
          { name: "target_kind", label: "Kind", hint: "node" },
          { name: "target_id", label: "Target", hint: "its id" },
          { name: "correlation_id", label: "Request", hint: "correlation id" },
          { name: "from", label: "From", hint: "2026-11-21T12:00:00Z" },
          { name: "until", label: "Until", hint: "2026-11-21T12:00:00Z" },
        ]}
        address={address}
        set={set}
      />
      <PagedTable
        label="Audit log"
        query={entries}
        page={address["page"]}
        open={(page) => set({ page })}
        keyOf={(entry) => `${entry.chain.epoch}:${entry.chain.shard}:${entry.chain.seq}`}
        none={<Nothing address={address}>Nothing is recorded yet. Each change appears here.</Nothing>}
        columns={[
          { title: "At", cell: (entry) => <FullTime at={entry.at} /> },
          { title: "Who", cell: (entry) => <Plain>{entry.actor}</Plain> },
          { title: "Action", cell: (entry) => <code>{entry.action}</code> },
          {
            title: "Target",
            cell: ({ target }) =>
              mayOpen ? (
                <Link to="/entities/$kind/$id" params={target}>
                  {target.kind} <code title={target.id}>{shortId(target.id)}</code>
                </Link>
              ) : (
                <>
                  {target.kind} <code title={target.id}>{shortId(target.id)}</code>
                </>
              ),
          },
          { title: "Reason", cell: (entry) => <Plain>{reasonOf(entry.metadata)}</Plain> },
          {
            title: "Request",
            cell: ({ correlation_id }) => (
              <Link to="/requests" search={{ correlation_id } as never}>
                <code title={correlation_id}>{shortId(correlation_id)}</code>
              </Link>
            ),
          },
        ]}
      />
      <CommandLine
        line={gpuctl(
          "audit", "list", ["--actor", address["actor"]], ["--action", address["action"]], ["--target-kind", address["target_kind"]], ["--target", address["target_id"]],
          ["--correlation-id", address["correlation_id"]], ["--from", address["from"]], ["--until", address["until"]],
        )}
      />
    </Guard>
  );
}

/** Why it was done: what a person wrote, else the code or the cause. Earlier releases wrote codes and causes as `reason`, too. */
function reasonOf({ reason, code, cause }: Record<string, unknown>): string | null {
  return [reason, code, cause].find((it) => typeof it === "string") ?? null;
}
