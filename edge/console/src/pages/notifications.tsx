// Where notifications are delivered: webhooks and e-mail.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { POLL_MS, pollEvery, pollUnreported } from "../api/query-client.ts";
import type { StreamMessage } from "../live/event-stream.ts";
import { connectionBefore, useMessages } from "../live/messages.ts";
import { missedChanges, missedQuery } from "../live/missed.ts";
import { useMe } from "../session/me.ts";
import { count, gpuctl, readable, shortId } from "../format/text.ts";
import { Action, Guard } from "../ui/action.tsx";
import { Card, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { Problem } from "../ui/problem.tsx";
import { State } from "../ui/state.tsx";
import { Copyable, Id, Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { PagedTable, Table } from "../ui/table.tsx";
import { useAddress } from "../ui/use-address.ts";

type Endpoint = Schemas["NotificationEndpoint"];

export default function NotificationsPage() {
  const [address, set] = useAddress();
  const page = address["page"];
  const { email } = useMe();
  const endpoints = useQuery({
    queryKey: ["endpoints", page],
    queryFn: () => dataOf(api.GET("/api/v1/notification-endpoints", { params: { query: page ? { page_token: page } : {} } })),
    placeholderData: keepPreviousData,
    refetchInterval: () => Math.min(pollEvery(POLL_MS)(), pollUnreported(60_000)()),
  });
  return (
    <Guard needs="keep_notification_endpoints">
      <Head title="Notifications" age={<Age query={endpoints} ofOperators />}>
        <Action
          spec={{
            id: "create-endpoint",
            primary: true,
            label: "Add…",
            title: "Add a receiver of notifications",
            consequences: <p>Messages about your allocations and your balance are delivered there. An e-mail goes to the address of your account.</p>,
            fields: [
              {
                name: "kind",
                label: "Kind",
                kind: "select",
                required: true,
                initial: email ? "email" : "webhook",
                options: [...(email ? [{ value: "email", label: `E-mail to ${email}` }] : []), { value: "webhook", label: "Webhook" }],
                ...(email ? {} : { help: "An e-mail needs an address that your identity provider has verified; your login has none." }),
              },
              { name: "url", label: "URL of the webhook", maxLength: 2048, pattern: "https://.+", help: "https:// only. Needed for a webhook." },
            ],
            command: (values) => (values["kind"] === "email" ? gpuctl("notification-endpoints", "create", "--email") : gpuctl("notification-endpoints", "create", ["--url", values["url"]])),
            send: (values, key) =>
              dataOf(
                api.POST("/api/v1/notification-endpoints", {
                  params: keyed(key),
                  body: values["kind"] === "webhook" ? { kind: "webhook", url: values["url"]?.trim() ?? "" } : { kind: "email" },
                }),
              ),
            refreshes: ["endpoints"],
          }}
        />
      </Head>
      <PagedTable
        label="Receivers"
        query={endpoints}
        page={page}
        open={(next) => set({ page: next })}
        keyOf={(endpoint) => endpoint.id}
        none={<p>Nothing receives your notifications. Add an e-mail or a webhook.</p>}
        columns={[
          { title: "Receiver", cell: (endpoint) => <Plain>{endpoint.url ?? endpoint.address ?? readable(endpoint.kind)}</Plain> },
          { title: "State", cell: (endpoint) => <State of={endpoint.state} /> },
          { title: "Events", cell: (endpoint) => endpoint.events?.join(", ") ?? "all" },
          { title: "Waiting", number: true, cell: (endpoint) => count(endpoint.waiting) },
          { title: "Last attempt", cell: (endpoint) => <LastAttempt of={endpoint} /> },
          { title: "Not delivered", cell: (endpoint) => <DeadLetters of={endpoint} /> },
          { title: "Actions", cell: (endpoint) => <EndpointActions of={endpoint} /> },
        ]}
      />
      <Received />
    </Guard>
  );
}

/** Messages, and the changes of allocations while no message could arrive. */
function Received() {
  const messages = useMessages();
  const { user_id } = useMe();
  const allocations = useQuery(missedQuery(user_id));
  const before = connectionBefore();
  const missed = before ? missedChanges(allocations.data ?? [], before.at, messages) : [];
  const rows = [
    ...messages.map(({ id, type, time, data }) => ({ id, type, time, data })),
    ...missed.map(({ id, time, ...data }) => ({ id, type: null, time, data: data as StreamMessage["data"] })),
  ].sort((a, b) => Date.parse(b.time) - Date.parse(a.time));
  return (
    <Card title="What happened" actions={missed.length > 0 && <Age query={allocations} />}>
      {before && missed.length > 0 && (
        <p className="soft">
          No message could arrive between <When at={before.at} /> and the opening of this tab. What changed in your allocations is in the list.
        </p>
      )}
      {allocations.error && <Problem error={allocations.error} />}
      <Table
        label="What happened"
        rows={rows}
        keyOf={({ id }) => id}
        none={<p>Nothing has happened since this browser was connected for the first time.</p>}
        columns={[
          { title: "What", cell: ({ data }) => <Plain>{data.message ?? [data.state, data.reason].filter(Boolean).map((code) => readable(String(code))).join(": ")}</Plain> },
          { title: "About", cell: ({ data }) => <About of={data} /> },
          { title: "At", cell: ({ time }) => <When at={time} /> },
          { title: "Event", cell: ({ type }) => (type ? <code>{type}</code> : <span className="soft">read afterwards</span>) },
        ]}
      />
    </Card>
  );
}

function About({ of: data }: { of: StreamMessage["data"] }) {
  if (data.allocation_id) {
    return (
      <Link to="/allocations/$id" params={{ id: data.allocation_id }}>
        allocation <code title={data.allocation_id}>{shortId(data.allocation_id)}</code>
      </Link>
    );
  }
  return data.account_id ? <Link to="/money">your money</Link> : null;
}

function LastAttempt({ of: { attempts } }: { of: Endpoint }) {
  const last = attempts[0];
  if (!last) return <span className="soft">none</span>;
  return (
    <>
      <When at={last.at} /> {last.error && <Plain>{last.error}</Plain>}
    </>
  );
}

const REFRESHES = ["endpoints", "dead-letters"];

function DeadLetters({ of: { id, dead_letters } }: { of: Endpoint }) {
  if (dead_letters === 0) return <span className="soft">none</span>;
  return (
    <Action
      quiet
      spec={{
        id: `resend:${id}`,
        label: `${count(dead_letters)} messages…`,
        title: "Messages that were not delivered",
        consequences: <DeadLetterList id={id} />,
        fields: [
          {
            name: "what",
            label: "What is done with all of them",
            kind: "select",
            required: true,
            initial: "resend",
            options: [
              { value: "resend", label: "Send them again" },
              { value: "dismiss", label: "Drop them" },
            ],
          },
        ],
        command: (values) => gpuctl("notification-endpoints", values["what"] ?? "resend", id),
        send: (values, key): Promise<unknown> => {
          const way = values["what"] === "dismiss" ? "dismiss" : "resend";
          return dataOf(api.POST(`/api/v1/notification-endpoints/{id}/dead-letters/${way}`, { params: { path: { id }, ...keyed(key) }, body: {} }));
        },
        refreshes: REFRESHES,
      }}
    />
  );
}

function DeadLetterList({ id }: { id: string }) {
  const letters = useQuery({
    queryKey: ["dead-letters", id],
    queryFn: () => dataOf(api.GET("/api/v1/notification-endpoints/{id}/dead-letters", { params: { path: { id } } })),
  });
  return (
    <Loaded query={letters}>
      {({ items, next_page }) => (
        <>
          <Table
            label="Messages"
            rows={items}
            keyOf={(letter) => letter.message_id}
            none={<p>None is left.</p>}
            columns={[
              { title: "Event", cell: (letter) => letter.event },
              { title: "Message", cell: (letter) => <Id>{letter.message_id}</Id> },
              { title: "Queued", cell: (letter) => <When at={letter.queued_at} /> },
              { title: "Last error", cell: (letter) => <Plain>{letter.last_error}</Plain> },
            ]}
          />
          {next_page && <p className="soft">There are more than are shown here; what is chosen below is done with all of them.</p>}
        </>
      )}
    </Loaded>
  );
}

function EndpointActions({ of: { id, kind, state } }: { of: Endpoint }) {
  const path = { id };
  const enable = state === "disabled";
  return (
    <span className="row-actions">
      <Action
        quiet
        spec={{
          id: `test-endpoint:${id}`,
          label: "Test…",
          title: "Send a test message",
          consequences: <p>One message of the type notifications.test is sent there.</p>,
          command: () => gpuctl("notification-endpoints", "test", id),
          send: (_, key) => dataOf(api.POST("/api/v1/notification-endpoints/{id}/test", { params: { path, ...keyed(key) } })),
          refreshes: REFRESHES,
        }}
      />
      {kind === "webhook" && (
        <Action
          quiet
          spec={{
            id: `endpoint-secret:${id}`,
            label: "Secret…",
            title: "Show the secret of the webhook",
            consequences: <p>The receiver checks the signature of each message by it. Show it on no shared screen.</p>,
            command: () => gpuctl("notification-endpoints", "secret", id),
            send: () => dataOf(api.GET("/api/v1/notification-endpoints/{id}/secret", { params: { path } })),
            refreshes: [],
            result: ({ secret }) => <Copyable text={secret} label="secret" />,
          }}
        />
      )}
      {kind === "webhook" && (
        <Action
          quiet
          spec={{
            id: `rotate-secret:${id}`,
            label: "New secret…",
            title: "Make another secret for the webhook",
            danger: true,
            consequences: <p>Messages are signed by both secrets for a day, so that the receiver can change over.</p>,
            command: () => gpuctl("notification-endpoints", "rotate-secret", id),
            send: (_, key) => dataOf(api.POST("/api/v1/notification-endpoints/{id}/secret", { params: { path, ...keyed(key) } })),
            refreshes: REFRESHES,
            result: ({ secret }) => <Copyable text={secret} label="secret" />,
          }}
        />
      )}
      <Action
        quiet
        spec={{
          id: `${enable ? "enable" : "disable"}-endpoint:${id}`,
          label: enable ? "Enable…" : "Disable…",
          title: enable ? "Deliver again" : "Disable delivery",
          consequences: <p>{enable ? "Messages from now on are delivered there." : "Nothing is delivered there until it is enabled again."}</p>,
          command: () => gpuctl("notification-endpoints", "set", id, enable ? "--enable" : "--disable"),
          send: () => dataOf(api.PATCH("/api/v1/notification-endpoints/{id}", { params: { path }, body: { enabled: enable } })),
          refreshes: REFRESHES,
        }}
      />
      <Action
        quiet
        spec={{
          id: `delete-endpoint:${id}`,
          label: "Delete…",
          title: "Delete this receiver",
          danger: true,
          consequences: <p>Messages that wait for it are dropped.</p>,
          command: () => gpuctl("notification-endpoints", "delete", id, "--yes"),
          send: () => dataOf(api.DELETE("/api/v1/notification-endpoints/{id}", { params: { path } })),
          refreshes: REFRESHES,
        }}
      />
    </span>
  );
}
