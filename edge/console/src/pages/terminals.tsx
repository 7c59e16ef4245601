// The terminals of all users, and their recordings, for administrators.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { newestFirst } from "../api/queries.ts";
import { POLL_MS, pollEvery } from "../api/query-client.ts";
import { gpuctl, readable, shortId } from "../format/text.ts";
import { useMay } from "../session/me.ts";
import { Action, Guard, REASON, type ActionSpec } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { GuardedLink } from "../ui/guarded-link.tsx";
import { Card, Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { State } from "../ui/state.tsx";
import { PagedTable, type Column } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";

type Session = Schemas["TerminalSession"];

const STATES: Schemas["TerminalSessionState"][] = ["opened", "attached", "detached", "closed"];

export default function TerminalsPage() {
  const [address, set] = useAddress();
  const sessions = useQuery({
    queryKey: ["terminals", address],
    queryFn: () => {
      const query = queryOf(address, ["state", "user_id"]) as { state?: Session["state"] };
      return newestFirst((order) => dataOf(api.GET("/api/v1/admin/terminal-sessions", { params: { query: { ...query, ...order } } })));
    },
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(POLL_MS),
  });
  return (
    <Guard needs="operate_terminals">
      <Head title="Terminals" age={<Age query={sessions} />} />
      <Filters
        of={[
          { name: "state", label: "State", options: STATES },
          { name: "user_id", label: "User", hint: "its id" },
        ]}
        address={address}
        set={set}
      />
      <PagedTable
        label="Terminals"
        query={sessions}
        page={address["page"]}
        open={(page) => set({ page })}
        keyOf={(session) => session.id}
        none={<Nothing address={address}>No terminal was opened. Users open them on the pages of their allocations.</Nothing>}
        columns={terminalColumns}
      />
      <AllRecordings user={address["user_id"]} page={address["recordings_page"]} open={(recordings_page) => set({ recordings_page }, { inPlace: true })} />
    </Guard>
  );
}

/** The columns of lists of terminals, the end of each included. */
export const terminalColumns: readonly Column<Session>[] = [
  { title: "User", cell: (session) => <Plain>{session.user_id}</Plain> },
  { title: "State", cell: (session) => <State of={session.state} /> },
  {
    title: "Allocation",
    cell: (session) => (
      <Link to="/allocations/$id" params={{ id: session.allocation_id }}>
        <code title={session.allocation_id}>{shortId(session.allocation_id)}</code>
      </Link>
    ),
  },
  {
    title: "Node",
    cell: (session) => (
      <GuardedLink needs="manage_nodes" to="/nodes/$id" params={{ id: session.node_id }}>
        <code title={session.node_id}>{shortId(session.node_id)}</code>
      </GuardedLink>
    ),
  },
  { title: "Opened", cell: (session) => <When at={session.opened_at} /> },
  { title: "Recorded", cell: (session) => readable(session.recording) },
  { title: "Ended because", cell: (session) => (session.close_reason ? readable(session.close_reason) : "") },
  { title: "Actions", cell: (session) => (session.state === "closed" ? "" : <Action quiet needs="operate_terminals" spec={killTerminal(session)} />) },
];

/** The end of a terminal by an administrator. */
export function killTerminal({ id }: Pick<Session, "id">): ActionSpec<unknown> {
  return {
    id: `kill-terminal:${id}`,
    label: "End…",
    title: "End this terminal",
    danger: true,
    consequences: <p>Its shell and what runs in it end at once. Its user reads that an administrator ended it; the allocation goes on.</p>,
    fields: [REASON],
    command: (values) => gpuctl("terminal", "sessions", "kill", id, ["--reason", values["reason"]]),
    send: (values, key) =>
      dataOf(api.POST("/api/v1/admin/terminal-sessions/{id}/kill", { params: { path: { id }, ...keyed(key) }, body: { reason: values["reason"] ?? "" } })),
    refreshes: ["terminals", "recordings"],
  };
}

/** The document that plays a recording, by the time of its beginning. */
export function RecordingLink({ of: { id, created_at } }: { of: Pick<Schemas["Recording"], "id" | "created_at"> }) {
  const may = useMay();
  if (!may("read_recordings")) return <When at={created_at} />;
  return (
    <a href={`/recordings/${id}`} target="_blank" rel="noopener">
      <When at={created_at} />
    </a>
  );
}

function AllRecordings({ user, page, open }: { user: string | undefined; page: string | undefined; open: (page: string | undefined) => void }) {
  const recordings = useQuery({
    queryKey: ["recordings", "all", user, page],
    queryFn: () => {
      const query = { limit: 20, ...(user ? { user_id: user } : {}), ...(page ? { page_token: page } : {}) };
      return newestFirst((order) => dataOf(api.GET("/api/v1/admin/recordings", { params: { query: { ...query, ...order } } })));
    },
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(60_000),
  });
  return (
    <Card title="Recordings" actions={<Age query={recordings} />}>
      <PagedTable
        label="Recordings"
        query={recordings}
        page={page}
        open={open}
        keyOf={(recording) => recording.id}
        none={<p>No terminal was recorded.</p>}
        columns={[
          {
            title: "Recording",
            cell: (recording) => <RecordingLink of={recording} />,
          },
          { title: "User", cell: (recording) => <Plain>{recording.user_id}</Plain> },
          { title: "Allocation", cell: (recording) => <code title={recording.allocation_id}>{shortId(recording.allocation_id)}</code> },
          { title: "Lasts", number: true, cell: (recording) => `${Math.round(recording.duration_ms / 1000)} s` },
          { title: "Complete", cell: (recording) => <State of={recording.complete ? "complete" : recording.lost_bytes > 0 ? "parts are missing" : "in progress"} /> },
        ]}
      />
    </Card>
  );
}
