// What is decided about a payment that was paid in another amount or currency than was ordered.
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { gpuctl } from "../format/text.ts";
import { REASON, type ActionSpec } from "../ui/action.tsx";

interface Decision {
  way: "settle-review" | "dismiss-review";
  label: string;
  title: string;
  consequences: string;
}

const DECISIONS: readonly Decision[] = [
  {
    way: "settle-review",
    label: "Settle…",
    title: "Settle this payment",
    consequences: "You have credited its worth by an adjustment of the account. The money itself is never credited. This cannot be undone.",
  },
  {
    way: "dismiss-review",
    label: "Dismiss…",
    title: "Dismiss this payment",
    consequences: "Nothing of it is credited: it goes back to its payer at the payment processor, or was not paid. This cannot be undone.",
  },
];

/** The decisions about a payment's `review`; none where it has no review. Each names the review, so that it never ends another one. */
export function paymentReviewActions({ id, review }: Pick<Schemas["Payment"], "id" | "review">): ActionSpec<unknown>[] {
  if (review == null) return [];
  return DECISIONS.map(({ way, label, title, consequences }) => ({
    id: `${way}:${id}`,
    label,
    title,
    danger: true,
    consequences,
    fields: [REASON, { name: "review", label: "What was paid", kind: "hidden", initial: review }],
    command: (values) => gpuctl("billing", way, id, ["--review", values["review"]], ["--reason", values["reason"]]),
    send: (values, key) =>
      dataOf(
        api.POST(`/api/v1/admin/billing/payments/{id}/${way}`, {
          params: { path: { id }, ...keyed(key) },
          body: { review: values["review"] ?? "", reason: values["reason"] ?? "" },
        }),
      ),
    refreshes: ["payments", "account-payments", "payment"],
  }));
}
