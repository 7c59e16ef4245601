// Which queries are read again after a notification, and how often.
import type { Query, QueryClient } from "@tanstack/react-query";
import type { StreamEvent, StreamMessage } from "./event-stream.ts";

/** The query of the caller's balance. */
export const BALANCE = "balance";

/** The queries that show entities of a kind, by the first part of their key. */
const OF_KIND: Readonly<Record<string, readonly string[]>> = {
  node: ["nodes", "node", "tasks", "gpu-map", "findings", "capacity"],
  allocation: ["allocations", "allocation", "capacity", "balance", "estimate", "gpu-map", "account"],
  sku: ["skus", "catalog"],
  tenant: ["ssh-keys"],
  bindings: ["platform-roles", "me"],
  service_account: ["service-accounts"],
  browser_session: ["sessions", "all-sessions"],
  policy: ["policy-values", "policy-resolved"],
  health_rules: ["health-rules"],
  rollout: ["rollouts", "rollout", "rollout-nodes"],
  terminal_session: ["terminals", "recordings"],
  key_set: ["keys"],
  billing_account: ["balance", "estimate", "accounts", "account", "account-ledger", "account-statements", "ledger", "spending", "statements"],
  payment: ["payments", "account-payments", "balance", "estimate"],
  processor_event: ["processor-events"],
  notification_endpoint: ["endpoints", "all-endpoints", "dead-letters"],
};
/** Those that show entities of every kind. */
const OF_ALL = ["tree", "entity", "fleet-overview", "audit", "cluster"];
/** Queries of one entity: the second part of the key is its id, or the third. */
const OF_ONE: Readonly<Record<string, number>> = { node: 1, tasks: 1, allocation: 1, rollout: 1, "rollout-nodes": 1, account: 1, "account-ledger": 1, "account-statements": 1, entity: 2 };

/** The names of the queries that a notification concerns. */
export function concerned({ type, data }: StreamMessage): readonly string[] {
  if (type === "runtime.changed") return [...OF_ALL, ...(data.kinds ?? []).flatMap((kind) => OF_KIND[kind] ?? [])];
  if (type.startsWith("billing.")) return ["balance", "estimate", "payments", "ledger", "statements", "spending"];
  if (type === "terminal.browser_session_ended") return ["sessions", "me"];
  if (type.startsWith("terminal.")) return ["terminals", "recordings"];
  if (type.startsWith("node.rollout_")) return OF_KIND["rollout"] ?? [];
  if (type.startsWith("node.")) return ["nodes", "node", "allocations", "allocation"];
  if (type.startsWith("provisioning.")) return OF_KIND["allocation"] ?? [];
  return [];
}

/** The least time between two reads of a query; more for one that takes long. */
const GAP_MS = 500;
/** The same of queries that most changes of entities do not concern. */
const LONG_GAP_MS: Readonly<Record<string, number>> = { audit: 10_000, cluster: 30_000 };
const TICK_MS = 100;

interface Reading {
  began: number;
  /** How long it took. */
  took: number;
}

/** Reads queries that are on screen again: each change is followed by a read that began after it, and none is read all the time. */
export class Refresher {
  private readonly due = new Set<string>();
  private readonly readings = new Map<string, Reading>();
  private timer: ReturnType<typeof setInterval> | undefined;

  constructor(private readonly queries: QueryClient) {}

  readonly onEvent = (event: StreamEvent): void => {
    switch (event.kind) {
      case "reset":
        this.all();
        return;
      case "sent":
        this.changed(event.names);
        return;
      case "message":
        this.changed(concerned(event.message), idsOf(event.message));
    }
  };

  /** All of them: messages may be missing. */
  all(): void {
    this.mark(() => true);
  }

  /** Those of these names; of the queries about one entity, those about one of `ids`, where these are known. */
  changed(names: readonly string[], ids: ReadonlySet<string> | null = null): void {
    if (names.length === 0) return;
    const of = new Set(names);
    this.mark(({ queryKey }) => {
      const name = String(queryKey[0]);
      const place = OF_ONE[name];
      return of.has(name) && (ids === null || place === undefined || ids.has(String(queryKey[place])));
    });
  }

  private mark(concerns: (query: Query) => boolean): void {
    for (const query of this.queries.getQueryCache().getAll()) {
      if (!concerns(query)) continue;
      // What is not on screen is read when it is shown next; in a hidden tab, when the tab is.
      query.invalidate();
      if (query.isActive() && !document.hidden) this.due.add(query.queryHash);
    }
    if (this.due.size > 0) {
      this.timer ??= setInterval(this.tick, TICK_MS);
      this.tick();
    }
  }

  private readonly tick = (): void => {
    // Not the time of day, which may be set back.
    const now = performance.now();
    for (const hash of this.due) {
      const query = this.queries.getQueryCache().get(hash);
      if (!query?.isActive()) {
        this.due.delete(hash);
        continue;
      }
      const last = this.readings.get(hash);
      // A read that has begun before the change may not have seen it: another one follows its end.
      if (query.state.fetchStatus === "fetching") continue;
      if (last && now < last.began + last.took + Math.max(LONG_GAP_MS[String(query.queryKey[0])] ?? GAP_MS, 2 * last.took)) continue;
      this.due.delete(hash);
      this.read(query, now);
    }
    if (this.due.size === 0) {
      clearInterval(this.timer);
      this.timer = undefined;
    }
  };

  private read(query: Query, began: number): void {
    const reading = { began, took: 0 };
    this.readings.set(query.queryHash, reading);
    void this.queries.refetchQueries({ queryKey: query.queryKey, exact: true, type: "active" }).finally(() => {
      reading.took = performance.now() - began;
    });
  }
}

/** The entities that a notification names; null where it names not all of them. */
function idsOf({ type, data }: StreamMessage): ReadonlySet<string> | null {
  if (type === "runtime.changed") return data.entities ? new Set(data.entities.map(({ id }) => id)) : null;
  const ids = [data.allocation_id, data.node_id, data.rollout_id, data.account_id].filter((id) => id != null);
  return ids.length > 0 ? new Set(ids) : null;
}
