// What an operator does about a stuck entity, where its row of the tree has all that the request needs.
import type { Schemas } from "../api/client.ts";
import type { Permission } from "../session/me.ts";
import type { ActionSpec } from "../ui/action.tsx";
import { forceRelease, retryRelease } from "./allocation-rescue.tsx";
import { processorEventActions } from "./processor-event-actions.ts";
import { rolloutActions } from "./rollout-actions.ts";
import { killTerminal } from "./terminals.tsx";

type Entity = Pick<Schemas["EntityNode"], "kind" | "id" | "state" | "status" | "overdue">;

export interface Remedies {
  needs: Permission;
  /** What they do, as the end of a sentence that begins with "To". */
  to: string;
  specs: readonly ActionSpec<unknown>[];
  /** Where the payment is read before it can be decided about: its row of the tree does not have what was paid. */
  isPayment?: boolean;
}

/** What is read again after a remedy: whether the entity is still stuck. */
export const TREE = ["tree", "entity", "fleet-overview"];

/**
 * The actions that end its wait; null where a restart, or its own page, has them. A node has none here: its tasks and findings have ids of their
 * own.
 */
export function remediesOf(entity: Entity): Remedies | null {
  // A parked entity takes no command before it is restarted.
  if (entity.status === "parked") return null;
  const found = ofKind(entity);
  if (found === null || (found.specs.length === 0 && !found.isPayment)) return null;
  return { ...found, specs: found.specs.map((spec) => ({ ...spec, refreshes: [...spec.refreshes, ...TREE] })) };
}

function ofKind({ kind, id, state, overdue }: Entity): Remedies | null {
  switch (kind) {
    case "allocation":
      return state === "release_failed" ? { needs: "rescue_allocations", to: "retry or force the release", specs: [retryRelease({ id }), forceRelease({ id })] } : null;
    case "payment":
      return state === "under_review" || (state === "refused" && overdue) ? { needs: "settle_processor_events", to: "settle or dismiss the payment", specs: [], isPayment: true } : null;
    case "processor_event":
      return { needs: "settle_processor_events", to: "retry or dismiss the event", specs: processorEventActions({ id, state, overdue }) };
    case "rollout":
      return state === "stopped" ? { needs: "manage_nodes", to: "resume or abort the rollout", specs: rolloutActions({ id, state }) } : null;
    case "terminal_session":
      return state === "closed" ? null : { needs: "operate_terminals", to: "end the terminal", specs: [killTerminal({ id })] };
    default:
      return null;
  }
}

export interface EntityPlace {
  to: string;
  label: string;
  /** What the page needs; none where it is shown to each role. */
  needs?: Permission;
}

/** The page of an entity of this kind, or the list that has it. */
const PAGES: Readonly<Record<string, EntityPlace>> = {
  allocation: { to: "/allocations/$id", label: "Its page" },
  node: { to: "/nodes/$id", label: "Its page", needs: "manage_nodes" },
  rollout: { to: "/rollouts/$id", label: "Its page", needs: "manage_nodes" },
  billing_account: { to: "/accounts/$id", label: "Its page", needs: "see_billing" },
  processor_event: { to: "/payment-events", label: "Payment events", needs: "see_billing" },
  terminal_session: { to: "/terminals", label: "Terminals", needs: "operate_terminals" },
  browser_session: { to: "/logins", label: "Logins", needs: "operate_browser_sessions" },
  key_set: { to: "/keys", label: "Keys", needs: "rotate_keys" },
  sku: { to: "/skus", label: "SKUs", needs: "see_skus" },
  notification_endpoint: { to: "/announcements", label: "Announcements", needs: "announce" },
};

export function pageOf(kind: string): EntityPlace | undefined {
  return PAGES[kind];
}
