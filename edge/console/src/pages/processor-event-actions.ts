// What is decided about an event of the payment processor that could not be carried out.
import { api, dataOf, keyed } from "../api/client.ts";
import { gpuctl } from "../format/text.ts";
import { REASON, type ActionSpec } from "../ui/action.tsx";

interface Decision {
  way: "retry" | "dismiss";
  label: string;
  title: string;
  consequences: string;
  danger?: boolean;
}

const DECISIONS: readonly Decision[] = [
  {
    way: "retry",
    label: "Retry…",
    title: "Process the event again",
    consequences: "It is processed again at once, with as many attempts as a new one. No amount is posted twice.",
  },
  {
    way: "dismiss",
    label: "Dismiss…",
    title: "Dismiss this event",
    consequences: "It is never processed: what it reports is not posted. Settle it by hand first, and write how.",
    danger: true,
  },
];

/** What its state allows. */
export function processorEventActions({ id, state, overdue = false }: { id: string; state: string | null | undefined; overdue?: boolean }): ActionSpec<unknown>[] {
  if (state !== "dead" && state !== "retrying" && !(state === "received" && overdue)) return [];
  return DECISIONS.map(({ way, label, title, consequences, danger = false }) => ({
    id: `${way}-event:${id}`,
    label,
    title,
    danger,
    consequences,
    fields: [REASON],
    command: (values) => gpuctl("processor-events", way, id, ["--reason", values["reason"]]),
    send: (values, key) =>
      dataOf(api.POST(`/api/v1/admin/billing/processor-events/{id}/${way}`, { params: { path: { id }, ...keyed(key) }, body: { reason: values["reason"] ?? "" } })),
    refreshes: ["processor-events"],
  }));
}
