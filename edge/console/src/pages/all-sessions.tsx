// Where all users are logged in by a browser, for administrators.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { newestFirst } from "../api/queries.ts";
import { pollEvery } from "../api/query-client.ts";
import { gpuctl, readable } from "../format/text.ts";
import { Action, Guard, REASON, type ActionSpec } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { State } from "../ui/state.tsx";
import { PagedTable } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";

type Session = Schemas["BrowserSession"];

export default function AllSessionsPage() {
  const [address, set] = useAddress();
  const sessions = useQuery({
    queryKey: ["all-sessions", address],
    queryFn: () => {
      const query = queryOf(address, ["state", "user_id"]) as { state?: Session["state"] };
      return newestFirst((order) => dataOf(api.GET("/api/v1/admin/browser-sessions", { params: { query: { ...query, ...order } } })));
    },
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(30_000),
  });
  return (
    <Guard needs="operate_browser_sessions">
      <Head title="Logins" age={<Age query={sessions} />} />
      <Filters
        of={[
          { name: "state", label: "State", options: ["active", "ended"] },
          { name: "user_id", label: "User", hint: "its id" },
        ]}
        address={address}
        set={set}
      />
      <PagedTable
        label="Logins"
        query={sessions}
        page={address["page"]}
        open={(page) => set({ page })}
        keyOf={(session) => session.id}
        none={<Nothing address={address}>No browser is logged in. Each login appears here.</Nothing>}
        columns={[
          { title: "User", cell: (session) => <Plain>{session.user_id}</Plain> },
          { title: "State", cell: (session) => <State of={session.state} /> },
          { title: "Browser", cell: (session) => <Plain>{session.user_agent}</Plain> },
          { title: "Address", cell: (session) => <Plain>{session.address}</Plain> },
          { title: "Since", cell: (session) => <When at={session.created_at} /> },
          { title: "Last seen", cell: (session) => <When at={session.last_seen_at} /> },
          { title: "Ended because", cell: (session) => (session.end_reason ? readable(session.end_reason) : "") },
          { title: "Actions", cell: (session) => (session.state === "active" ? <Action quiet spec={end(session)} /> : "") },
        ]}
      />
    </Guard>
  );
}

export function end({ id, user_id, is_current }: Pick<Session, "id" | "user_id" | "is_current">): ActionSpec<unknown> {
  return {
    id: `end-any-session:${id}`,
    label: "End…",
    title: is_current ? "End your own session" : "End a session",
    danger: true,
    consequences: (
      <ul>
        <li>
          <Plain>{user_id}</Plain> is logged out there from the next request on, at every replica.
        </li>
        <li>Terminals that it has open end. A new login needs the identity provider: lock the account there too, where the user must stay out.</li>
      </ul>
    ),
    fields: [REASON],
    command: (values) => gpuctl("sessions", "kill", id, ["--reason", values["reason"]]),
    send: (values, key) =>
      dataOf(api.POST("/api/v1/admin/browser-sessions/{id}/end", { params: { path: { id }, ...keyed(key) }, body: { reason: values["reason"] ?? "" } })),
    refreshes: ["all-sessions", "sessions"],
  };
}
