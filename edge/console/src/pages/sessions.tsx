// Where the caller is logged in.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { pollUnreported } from "../api/query-client.ts";
import { endSession, sessionsPage, type BrowserSessionView } from "../session/console-api.ts";
import { gpuctl } from "../format/text.ts";
import { Action } from "../ui/action.tsx";
import { Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { PagedTable } from "../ui/table.tsx";
import { useAddress } from "../ui/use-address.ts";

export default function SessionsPage() {
  const [address, set] = useAddress();
  const page = address["page"];
  const sessions = useQuery({
    queryKey: ["sessions", page],
    queryFn: () => sessionsPage(page),
    placeholderData: keepPreviousData,
    refetchInterval: pollUnreported(60_000),
  });
  return (
    <>
      <Head title="Sessions" age={<Age query={sessions} ofOperators />} />
      <p className="soft page-note">Where you are logged in. End what you do not know, then change your password at your identity provider.</p>
      <PagedTable
        label="Sessions"
        query={sessions}
        page={page}
        open={(next) => set({ page: next })}
        keyOf={(session) => session.id}
        none={<p>You are logged in nowhere by a browser. Each login appears here.</p>}
        columns={[
          { title: "Browser", cell: (session) => <Plain>{session.user_agent}</Plain> },
          { title: "Address", cell: (session) => <Plain>{session.address}</Plain> },
          { title: "Since", cell: (session) => <When at={session.created_at} /> },
          { title: "Last seen", cell: (session) => <When at={session.last_seen_at} /> },
          { title: "Ends unused", cell: (session) => <When at={session.idle_ends_at} /> },
          { title: "Ends", cell: (session) => <When at={session.ends_at} /> },
          { title: "This one", cell: (session) => (session.is_current ? <State of="this browser" /> : "") },
          { title: "Actions", cell: (session) => <End of={session} /> },
        ]}
      />
    </>
  );
}

function End({ of: { id, user_agent, is_current } }: { of: BrowserSessionView }) {
  return (
    <Action
      quiet
      needs="keep_browser_sessions"
      spec={{
        id: `end-session:${id}`,
        label: "End…",
        title: is_current ? "End this session" : "End a session",
        danger: true,
        consequences: (
          <ul>
            <li>
              <Plain>{user_agent}</Plain> is logged out from the next request on.
            </li>
            <li>Terminals that it has open end.</li>
          </ul>
        ),
        command: () => gpuctl("sessions", "end", id),
        send: (_, key) => endSession(id, key),
        refreshes: ["sessions"],
      }}
    />
  );
}
