// One entity: what its state machine has done, what it waits for, and its restart.
import { useQuery } from "@tanstack/react-query";
import { api, dataOf } from "../api/client.ts";
import { pollOfMembers } from "../api/query-client.ts";
import { count, shortId, readable } from "../format/text.ts";
import { Guard } from "../ui/action.tsx";
import { Card, Facts, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { Id, Plain } from "../ui/text.tsx";
import { FullTime, When } from "../ui/time.tsx";
import { Table } from "../ui/table.tsx";
import { usePart } from "../ui/use-address.ts";
import { RestartEntity } from "./restart-entity.tsx";

/** Whether the list, newest first, goes back to the entity's first transition. */
function isWhole(history: readonly { version: number }[]): boolean {
  return history.length === 0 || history.at(-1)?.version === 1;
}

export default function EntityPage() {
  const kind = usePart("kind");
  const id = usePart("id");
  const report = useQuery({
    queryKey: ["entity", kind, id],
    queryFn: () => dataOf(api.GET("/api/v1/admin/runtime/entities/{kind}/{id}", { params: { path: { kind, id } as never } })),
    // Its mailbox and its member's silence are no changes of it.
    refetchInterval: pollOfMembers,
  });
  return (
    <Guard needs="operate_runtime">
      <Loaded query={report}>
        {({ entity, history, earlier_history_removed: isCut }) => (
          <>
            <Head title={`${readable(entity.kind)} ${shortId(entity.id)}`} age={<Age query={report} polled />}>
              <RestartEntity kind={entity.kind} id={entity.id} />
            </Head>
            <div className="columns">
              <Card title="History">
                <p className="soft">
                  {isWhole(history) ? "All transitions" : `The last ${count(history.length)} transitions`}, the newest first.
                </p>
                <Table
                  label="History"
                  rows={history}
                  keyOf={(transition) => String(transition.version)}
                  none={<p>It has no history.</p>}
                  columns={[
                    { title: "Version", number: true, cell: (transition) => count(transition.version) },
                    { title: "Command", cell: (transition) => <code>{transition.command}</code> },
                    { title: "To", cell: (transition) => <State of={transition.to_state} /> },
                    { title: "Why", cell: (transition) => <Plain>{transition.why}</Plain> },
                    { title: "Who", cell: (transition) => <Plain>{transition.actor}</Plain> },
                    { title: "At", cell: (transition) => <FullTime at={transition.at} /> },
                  ]}
                />
                {isCut && <p className="soft">Earlier transitions were removed, as policy retention.history_months says.</p>}
              </Card>
              <aside>
                <Card title="Where it is">
                  <Facts
                    of={[
                      ["State", entity.state ? <State key="s" of={entity.state} overdue={entity.overdue} /> : "–"],
                      ["Since", <When key="i" at={entity.since} />],
                      ["Waits for", <Plain key="w">{entity.waits_for}</Plain>],
                      ["Deadline", <When key="d" at={entity.deadline_at} />],
                      ["Next timer", <When key="t" at={entity.wakes_at} />],
                      ["Actor", <State key="a" of={entity.status} />],
                      ["Restarts", count(entity.restarts)],
                      ["Mailbox", count(entity.mailbox_depth)],
                      ["Last error", <Plain key="e">{entity.last_error}</Plain>],
                      ["Member", <Plain key="m">{entity.member_name}</Plain>],
                      ["Shard", count(entity.shard)],
                      ["Version", count(entity.version)],
                      ["Id", <Id key="id">{entity.id}</Id>],
                    ]}
                  />
                </Card>
              </aside>
            </div>
          </>
        )}
      </Loaded>
    </Guard>
  );
}
