// What administrators announce to all users, and the receivers of notifications of all users.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { pollEvery } from "../api/query-client.ts";
import { count, gpuctl, readable } from "../format/text.ts";
import { useMessages } from "../live/messages.ts";
import { Action, Guard, type ActionSpec } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Card, Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { State } from "../ui/state.tsx";
import { PagedTable, Table } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";

type Endpoint = Schemas["NotificationEndpoint"];

export default function AnnouncementsPage() {
  const [address, set] = useAddress();
  const endpoints = useQuery({
    queryKey: ["all-endpoints", address],
    queryFn: () => dataOf(api.GET("/api/v1/admin/notification-endpoints", { params: { query: queryOf(address, ["state", "user_id"]) as { state?: Endpoint["state"] } } })),
    placeholderData: keepPreviousData,
    refetchInterval: pollEvery(30_000),
  });
  const announced = useMessages().filter(({ type }) => type === "notification.announced");
  return (
    <Guard needs="announce">
      <Head title="Announcements" age={<Age query={endpoints} />}>
        <Action spec={announce} />
      </Head>
      <Card title="Announced to this browser">
        <Table
          label="Announcements"
          rows={announced}
          keyOf={({ id }) => id}
          none={<p>Nothing was announced. Announce something above.</p>}
          columns={[
            { title: "Announcement", cell: ({ data }) => <Plain>{data.message}</Plain> },
            { title: "Severity", cell: ({ data }) => <State of={data.severity ?? "info"} /> },
            { title: "At", cell: ({ time }) => <When at={time} /> },
          ]}
        />
      </Card>
      <Card title="Receivers of notifications">
        <Filters
          of={[
            { name: "state", label: "State", options: ["active", "failing", "disabled"] },
            { name: "user_id", label: "User", hint: "its id" },
          ]}
          address={address}
          set={set}
        />
        <PagedTable
          label="Receivers of notifications"
          query={endpoints}
          page={address["page"]}
          open={(page) => set({ page })}
          keyOf={(endpoint) => endpoint.id}
          none={<Nothing address={address}>No user has a receiver. Users add theirs on their page Notifications.</Nothing>}
          columns={[
            { title: "Of", cell: (endpoint) => <Plain>{endpoint.org_id ? `organization ${endpoint.org_id}` : endpoint.user_id}</Plain> },
            { title: "Receiver", cell: (endpoint) => <Plain>{endpoint.url ?? endpoint.address ?? readable(endpoint.kind)}</Plain> },
            { title: "State", cell: (endpoint) => <State of={endpoint.state} /> },
            { title: "Failing since", cell: (endpoint) => <When at={endpoint.failing_since} /> },
            { title: "Waiting", number: true, cell: (endpoint) => count(endpoint.waiting) },
            { title: "Not delivered", number: true, cell: (endpoint) => count(endpoint.dead_letters) },
            { title: "Last error", cell: (endpoint) => <Plain>{endpoint.attempts[0]?.error}</Plain> },
          ]}
        />
      </Card>
    </Guard>
  );
}

const announce: ActionSpec<unknown> = {
  id: "announce",
  primary: true,
  label: "Announce…",
  title: "Announce something to all users",
  consequences: <p>All connected clients receive it at once: open consoles, and programs that subscribe. It cannot be taken back, and clients that connect later do not receive it.</p>,
  fields: [
    {
      name: "severity",
      label: "Severity",
      kind: "select",
      required: true,
      initial: "info",
      options: ["info", "warning", "critical"].map((value) => ({ value, label: value })),
    },
    { name: "message", label: "Text", required: true, maxLength: 500, help: "One line. No keys or passwords." },
  ],
  command: (values) => gpuctl("notifications", "broadcast", [values["message"] || "TEXT"], ["--severity", values["severity"]]),
  send: (values, key) => {
    const body = { severity: values["severity"] as Schemas["NewAnnouncement"]["severity"], message: values["message"] ?? "" };
    return dataOf(api.POST("/api/v1/admin/notifications/broadcast", { params: keyed(key), body }));
  },
  refreshes: [],
};
