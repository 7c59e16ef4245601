// Events of the payment processor: those that could not be carried out are retried or dismissed here.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { api, dataOf, type Schemas } from "../api/client.ts";
import { newestFirst } from "../api/queries.ts";
import { POLL_MS, pollUnreported } from "../api/query-client.ts";
import { count, readable } from "../format/text.ts";
import { Action, Guard, RoleNeeded } from "../ui/action.tsx";
import { Filters } from "../ui/filters.tsx";
import { Head } from "../ui/layout.tsx";
import { Age } from "../ui/loaded.tsx";
import { Nothing } from "../ui/nothing.tsx";
import { State } from "../ui/state.tsx";
import { PagedTable } from "../ui/table.tsx";
import { Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { queryOf, useAddress } from "../ui/use-address.ts";
import { processorEventActions } from "./processor-event-actions.ts";

type ProcessorEvent = Schemas["ProcessorEvent"];

const STATES: Schemas["ProcessorEventState"][] = ["dead", "retrying", "received", "processed", "dismissed"];

export default function ProcessorEventsPage() {
  const [address, set] = useAddress();
  const events = useQuery({
    queryKey: ["processor-events", address],
    queryFn: () => {
      const query = queryOf(address, ["state", "event_id"]) as { state?: ProcessorEvent["state"] };
      return newestFirst((order) => dataOf(api.GET("/api/v1/admin/billing/processor-events", { params: { query: { ...query, ...order } } })));
    },
    placeholderData: keepPreviousData,
    // Changes are reported to operators alone, and others may see events.
    refetchInterval: pollUnreported(POLL_MS),
  });
  return (
    <Guard needs="see_billing">
      <Head title="Payment events" age={<Age query={events} ofOperators />} />
      <p className="soft page-note">
        What the payment processor reported. An event is dead when all its attempts have failed: find the cause, then retry it, or dismiss it with what you did instead.
      </p>
      <RoleNeeded needs="settle_processor_events" to="retry or dismiss an event" />
      <Filters
        of={[
          { name: "state", label: "State", options: STATES },
          { name: "event_id", label: "Id at the processor", hint: "evt_…" },
        ]}
        address={address}
        set={set}
      />
      <PagedTable
        label="Payment events"
        query={events}
        page={address["page"]}
        open={(page) => set({ page })}
        keyOf={(event) => event.id}
        none={<Nothing address={address}>The payment processor has sent no event. Events appear with the first payment.</Nothing>}
        columns={[
          { title: "Event", cell: (event) => <code>{event.event_type}</code> },
          { title: "State", cell: (event) => <State of={event.state} overdue={event.overdue} /> },
          { title: "Attempts", number: true, cell: (event) => count(event.attempts) },
          { title: "Last error", cell: (event) => <Plain>{event.last_error ?? event.dismissed_because}</Plain> },
          { title: "Outcome", cell: (event) => (event.outcome === "told" ? "applied" : event.outcome ? readable(event.outcome) : "") },
          { title: "Received", cell: (event) => <When at={event.received_at} /> },
          { title: "Next attempt", cell: (event) => <When at={event.next_attempt_at} /> },
          { title: "At the processor", cell: (event) => <code>{event.event_id}</code> },
          { title: "Actions", cell: (event) => <Settle of={event} /> },
        ]}
      />
    </Guard>
  );
}

function Settle({ of: event }: { of: ProcessorEvent }) {
  return (
    <span className="row-actions">
      {processorEventActions(event).map((spec) => (
        <Action key={spec.id} quiet needs="settle_processor_events" spec={spec} />
      ))}
    </span>
  );
}
