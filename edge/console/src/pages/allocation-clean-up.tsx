// What is left of an allocation on its node: nothing, as the node has proved, or what keeps it from that.
import type { Allocation } from "../api/queries.ts";
import { readable } from "../format/text.ts";
import { Card } from "../ui/layout.tsx";
import { State } from "../ui/state.tsx";
import { Plain } from "../ui/text.tsx";
import { FullTime, When } from "../ui/time.tsx";

export type CleanUp = "not-begun" | "in-progress" | "failed" | "proved" | "forced" | "not-needed";

/** How far the clean-up is. The reason of the last state says how an allocation has ended. */
export function cleanUpOf({ state, status_history }: Pick<Allocation, "state" | "status_history">): CleanUp {
  if (state === "releasing") return "in-progress";
  if (state === "release_failed") return "failed";
  if (state !== "released") return "not-begun";
  const reason = status_history.at(-1)?.reason;
  return reason === "cleaned_up" ? "proved" : reason === "forced" ? "forced" : "not-needed";
}

export function CleanUpProof({ of: allocation }: { of: Allocation }) {
  const how = cleanUpOf(allocation);
  if (how === "not-begun") return null;
  return (
    <Card title="Clean-up" actions={how === "not-needed" ? null : <State of={STATES[how]} />}>
      <p>
        <Text how={how} of={allocation} />
      </p>
    </Card>
  );
}

const STATES = { "in-progress": "in progress", failed: "failed", proved: "proved", forced: "without proof" } as const;

function Text({ how, of: { released_at, state_reason, deadline_at } }: { how: Exclude<CleanUp, "not-begun">; of: Allocation }) {
  switch (how) {
    case "in-progress":
      return (
        <>
          The node removes what is left of it, and proves that. Its GPUs are not rented again before.
          {deadline_at && (
            <>
              {" "}
              The proof is due <When at={deadline_at} />.
            </>
          )}
        </>
      );
    case "failed":
      return (
        <>
          The node has not proved that nothing is left of it: <Plain>{readable(state_reason)}</Plain>. Its GPUs are not rented again before it has. Nothing more is billed.
        </>
      );
    case "proved":
      return (
        <>
          The node has proved by a signed report that nothing is left of it: <FullTime at={released_at} />.
        </>
      );
    case "forced":
      return (
        <>
          An administrator has released it without the node's proof: <FullTime at={released_at} />. Data on a broken machine may be left there; ask the operator where that matters.
        </>
      );
    case "not-needed":
      return <>It never ran on a node: nothing had to be removed.</>;
  }
}
