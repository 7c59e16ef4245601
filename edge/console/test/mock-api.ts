// A small control plane in memory: what the console asks is answered as the description of the API says.
import type { paths } from "../generated/schema.d.ts";
import type { Schemas } from "../src/api/client.ts";
import type { BrowserSessionView } from "../src/session/console-api.ts";
import * as fixtures from "./fixtures.ts";

type Body<P extends keyof paths> = paths[P] extends { get: { responses: { 200: { content: { "application/json": infer B } } } } } ? B : never;
type Reads = { [P in keyof paths]?: (parts: string[], query: URLSearchParams) => Body<P> };

const list = <T>(...items: T[]) => ({ items, next_page: null });

/** A list in the order that is asked for; the items are given oldest first. */
const ordered = <T>(query: URLSearchParams, ...items: T[]) => list(...(query.get("order") === "newest_first" ? items.reverse() : items));

export interface SentRequest {
  method: string;
  path: string;
  key: string | null;
  body: unknown;
}

/** An answer that a test puts in front of the usual one. */
export type Override = (request: Request) => Response | null | Promise<Response | null>;

export function refusal(status: number, code: string, message: string, headers: Record<string, string> = {}, details: Record<string, unknown> = {}): Response {
  return Response.json({ code, message, correlation_id: "0199e3f4-cafe", details: { service: "api", ...details } }, { status, headers });
}

export class MockApi {
  role: fixtures.Role = "user";
  /** False: requests are refused as those of an ended session. */
  hasSession = true;
  user: string | null = null;
  readonly sent: SentRequest[] = [];
  readonly overrides: Override[] = [];
  allocations = [...fixtures.allocations];
  balance = fixtures.balance;
  postings = Array.from({ length: 60 }, (_, index) => fixtures.posting(index + 1));

  private readonly reads: Reads = {
    "/api/v1/me": () => ({ ...fixtures.me(this.role), ...(this.user ? { user_id: this.user } : {}) }),
    "/api/v1/skus": () => list(fixtures.sku),
    "/api/v1/capacity": () => ({
      at: fixtures.ago(0),
      items: [{ sku: "h100-8", sku_id: fixtures.sku.id, region_code: "eu-west-1", gpus_free: 14, largest_free: 8 }],
    }),
    "/api/v1/billing/balance": () => this.balance,
    "/api/v1/billing/estimate": (_, query) => ({
      currency: "EUR",
      amount_minor_per_gpu_hour: 250,
      minor_per_hour: 250 * Number(query.get("gpu_count")),
      cost_micro: 6_000_000_000 * Number(query.get("gpu_count")),
      needed_micro: 250_000_000,
      available_micro: 118_000_000_000,
      is_covered: true,
      lasts_seconds: 600_000,
    }),
    "/api/v1/billing/ledger": () => list(...this.postings),
    "/api/v1/billing/payments": (_, query) => ordered(query, fixtures.payment, { ...fixtures.payment, id: fixtures.uuid(401), state: "open", left_minor: 0 }),
    "/api/v1/billing/payments/{id}": ([id]) => ({ ...fixtures.payment, id: id ?? "", state: "under_review", review: "pi_1:4200:GBP", left_minor: 0, reason: "42.00 GBP was paid" }),
    "/api/v1/billing/statements": () => list(fixtures.statement),
    "/api/v1/allocations": (_, query) => {
      const found = this.allocations.filter(({ state, node_id }) => (query.get("state") ?? state) === state && (query.get("node_id") ?? node_id) === node_id);
      return list(...(query.has("node_id") ? found.reverse() : found));
    },
    "/api/v1/allocations/{id}": ([id]) => this.allocations.find((found) => found.id === id) ?? fixtures.allocation(0),
    "/api/v1/allocations/{id}/telemetry": ([id]) => ({
      allocation_id: id ?? "",
      at: fixtures.ago(0),
      gpus: fixtures.allocation(1).devices.map((device) => ({ ...device, utilization_percent: 87, memory_used_mib: 60_000, memory_total_mib: 81_920, temperature_celsius: 61 })),
    }),
    "/api/v1/allocations/{id}/recordings": () => list(fixtures.recording),
    "/api/v1/allocations/{id}/terminal-sessions": () => list(fixtures.terminal),
    "/api/v1/ssh-keys": () => list(fixtures.sshKey),
    "/api/v1/service-accounts": () => list(fixtures.serviceAccount),
    "/api/v1/notification-endpoints": () => list(fixtures.endpoint),
    "/api/v1/notification-endpoints/{id}/dead-letters": () =>
      list({ message_id: fixtures.uuid(501), event: "allocations.active", attempts: 8, queued_at: fixtures.ago(500), last_error: "503" }),
    "/api/v1/admin/nodes": () => list(...fixtures.nodes),
    "/api/v1/admin/nodes/{id}": ([id]) => fixtures.nodes.find((found) => found.id === id) ?? fixtures.node(0),
    "/api/v1/admin/nodes/{id}/tasks": () => ({
      open: [
        { task_id: fixtures.uuid(801), type: "node.validate", state: "awaits_operator", attempt: 3, ordered_at: fixtures.ago(90), deadline_at: fixtures.ago(5), overdue: true },
      ],
      ended: [{ task_id: fixtures.uuid(802), type: "diagnostics.collect", attempt: 1, succeeded: true, ended_at: fixtures.ago(600), output: {} }],
      reports: [],
      next_page: null,
    }),
    "/api/v1/admin/skus": () =>
      list({ ...fixtures.sku, generation: 3, validation: {}, approvals: [{ actor: "user:eve", at: fixtures.ago(50), change: "deprecate", reason: "replaced", role: "inventory_owner" }] }),
    "/api/v1/admin/policies": () => ({
      items: [
        { key: "allocation.max_concurrent_per_user", type: "int", default: 10, bounds: { min: 0, max: 1000 }, scopes: ["user_id", "org_id", "plan", "global"], meaning: "How many allocations a user may have." },
      ],
    }),
    "/api/v1/admin/policy-values": () =>
      list(
        {
          id: fixtures.uuid(851), key: "allocation.max_concurrent_per_user", value: 15, scope: { org_id: "acme" }, reason: "the new contract", effective_at: fixtures.ago(-9000), written_at: fixtures.ago(10),
          written_by: "user:root",
        },
        {
          id: fixtures.uuid(850), key: "allocation.max_concurrent_per_user", value: 20, scope: { user_id: "ann" }, reason: "research", effective_at: fixtures.ago(90), written_at: fixtures.ago(90),
          written_by: "user:root",
        },
      ),
    "/api/v1/admin/audit-log": () =>
      list({
        at: fixtures.ago(7), actor: "user:root", action: "nodes.quarantine", target: { kind: "node", id: fixtures.uuid(50) }, correlation_id: "0199e3f4-cafe",
        metadata: { reason: "<b>noisy</b>" }, chain: { epoch: 1, shard: 3, seq: 12 },
      }),
    "/api/v1/admin/overview": () => ({
      at: fixtures.ago(0),
      entities_by_kind: { allocation: { active: 2, release_failed: 1 }, node: { active: 1, quarantined: 1 } },
      gpus: [{ sku: "h100-8", sku_id: fixtures.sku.id, region_code: "eu-west-1", nodes: 3, gpus_free: 6, gpus_held: 2, gpus_total: 24 }],
      money: [{ currency: "EUR", accounts: 12, depleted: 1, balance_minor: 99_000_000 }],
      overdue: 1,
      parked: 0,
      silent_members: [],
    }),
    "/api/v1/admin/alerts": () => ({ at: fixtures.ago(0), is_configured: true, total: fixtures.alerts.length, items: fixtures.alerts }),
    "/api/v1/admin/rollouts": () => list(fixtures.rollout, { ...fixtures.rollout, id: fixtures.uuid(1001), state: "completed", stopped_by: null, waiting: 0 }),
    "/api/v1/admin/rollouts/{id}": () => fixtures.rollout,
    "/api/v1/admin/rollouts/{id}/nodes": () =>
      list<Schemas["RolloutNode"]>(
        { node_id: fixtures.uuid(50), host: "gpu-0.example.net", outcome: "failed", reason: "did_not_start" },
        { node_id: fixtures.uuid(51), host: "gpu-1.example.net", outcome: "open" },
        { node_id: fixtures.uuid(52), host: "gpu-2.example.net", outcome: "updated" },
      ),
    "/api/v1/admin/health-rules": () => fixtures.healthRules,
    "/api/v1/admin/terminal-sessions": (_, query) => {
      const all = [fixtures.terminal, { ...fixtures.terminal, id: fixtures.uuid(1101), state: "closed" as const, close_reason: "user_closed", user_id: "<b>eve</b>" }];
      return list(...all.filter(({ state }) => (query.get("state") ?? state) === state));
    },
    "/api/v1/admin/recordings": () => list(fixtures.recording),
    "/api/v1/admin/billing/accounts": () => list(this.balance, { ...this.balance, id: fixtures.uuid(2), user_id: null, org_id: "acme", state: "depleted", balance_minor: -1250 }),
    "/api/v1/admin/billing/accounts/{id}": () => ({
      account: this.balance,
      opened_at: fixtures.ago(90_000),
      meters: [{ allocation_id: fixtures.uuid(101), user_id: "ann", minor_per_hour: 500, charged_micro: 8_333_333, held_micro: 41_666_667, written_off_micro: 0, billed_until: fixtures.ago(1), from: fixtures.ago(200) }],
    }),
    "/api/v1/admin/billing/accounts/{id}/ledger": () => list(...[1, 2, 3].map(fixtures.posting)),
    "/api/v1/admin/billing/accounts/{id}/payments": (_, query) =>
      ordered(query, fixtures.payment, { ...fixtures.payment, id: fixtures.uuid(402), state: "under_review", review: "pi_1:4200:GBP", left_minor: 0, reason: "42.00 GBP was paid at the payment processor, and 50.00 EUR was to be paid; an operator decides about it" }),
    "/api/v1/admin/billing/accounts/{id}/statements": () => list(fixtures.statement),
    "/api/v1/admin/billing/processor-events": () =>
      list(fixtures.processorEvent, { ...fixtures.processorEvent, id: fixtures.uuid(1201), state: "processed", outcome: "told", last_error: null, event_type: "checkout.session.completed" }),
    "/api/v1/admin/keys": () => fixtures.keys,
    "/api/v1/admin/platform-roles/bindings": () => list(fixtures.binding, { ...fixtures.binding, id: fixtures.uuid(1401), subject: "root", role: "platform_operations" }),
    "/api/v1/admin/browser-sessions": () =>
      list<Schemas["BrowserSession"]>({
        id: fixtures.uuid(905), user_id: "ann", state: "active", is_current: false, created_at: fixtures.ago(90), last_seen_at: fixtures.ago(1), idle_ends_at: fixtures.ago(-30), ends_at: fixtures.ago(-600),
        address: "192.0.2.7", user_agent: "Firefox on Linux",
      }),
    "/api/v1/admin/notification-endpoints": () => list({ ...fixtures.endpoint, user_id: "ann", failing_since: fixtures.ago(200) }),
    "/api/v1/admin/users/{user_id}/ssh-keys": () => list(fixtures.sshKey, { ...fixtures.sshKey, id: fixtures.uuid(301), name: "old laptop", is_default: false }),
    "/api/v1/admin/telemetry/fleet": () => fixtures.fleet,
    "/api/v1/admin/fleet-history": () => fixtures.fleetHistory,
    "/api/v1/admin/policy-values/resolve": (_, query) => ({
      key: query.get("key") ?? "", value: query.get("user_id") ? 20 : 10, source: query.get("user_id") ? "user_id" : "default", ...(query.get("user_id") ? { scope: { user_id: "ann" }, effective_at: fixtures.ago(90) } : {}),
    }),
    "/api/v1/billing/statements/{month}": ([month]) => ({ ...fixtures.statement, month: month ?? "", account_id: fixtures.uuid(1), as_of: fixtures.ago(0), lines: fixtures.statementLines }),
    "/api/v1/admin/billing/accounts/{id}/statements/{month}": ([, month]) => ({
      ...fixtures.statement, month: month ?? "", account_id: fixtures.uuid(1), as_of: fixtures.ago(0), lines: fixtures.statementLines,
    }),
    "/api/v1/admin/runtime/cluster": () => ({
      answered_by: fixtures.uuid(700),
      incarnation: 1,
      unowned_shards: 0,
      members: [{ id: fixtures.uuid(700), name: "replica-1", roles: ["api"], shards: [1, 2, 3], silent_for_ms: 90, started_at: fixtures.ago(5000), clock_offset_ms: 1 }],
    }),
    "/api/v1/admin/runtime/tree": (_, query) => fixtures.tree(query.get("parked") ? [] : [fixtures.entity]),
    "/api/v1/admin/runtime/entities/{kind}/{id}": () => ({
      entity: fixtures.entity,
      earlier_history_removed: true,
      // As the API answers: the newest first.
      history: [{ version: 8, command: "ReleaseFailed", from_state: "releasing", to_state: "release_failed", actor: "system:saga", why: "no proof", at: fixtures.ago(50), correlation_id: "c" },
        { version: 7, command: "Release", from_state: "active", to_state: "releasing", actor: "user:ann", why: "released by its user", at: fixtures.ago(60), correlation_id: "b" }],
    }),
  };

  /** The answer to a request, with a record of those that change something. */
  async answer(request: Request): Promise<Response> {
    const url = new URL(request.url);
    if (request.method !== "GET") {
      const text = await request.clone().text();
      this.sent.push({ method: request.method, path: url.pathname, key: request.headers.get("Idempotency-Key"), body: text === "" ? null : JSON.parse(text) });
    }
    for (const override of this.overrides) {
      const answer = await override(request);
      if (answer) return answer;
    }
    if (!this.hasSession) return refusal(401, "session_ended", "The session has ended; log in again.");
    if (request.method === "GET") return this.read(url);
    return this.write(request.method, url.pathname, (this.sent.at(-1)?.body ?? {}) as Record<string, unknown>);
  }

  /** The usual answer to a GET request, which a test may change before it is sent. */
  read(url: URL): Response {
    if (url.pathname === "/api/v1/me/sessions") {
      const own: BrowserSessionView = {
        id: fixtures.uuid(900), user_id: fixtures.uuid(1), state: "active", is_current: true, created_at: fixtures.ago(90), last_seen_at: fixtures.ago(1), idle_ends_at: fixtures.ago(-30), ends_at: fixtures.ago(-600),
        address: "192.0.2.7", user_agent: "Firefox on Linux",
      };
      return Response.json(list(own, { ...own, is_current: false, id: fixtures.uuid(901), user_agent: "<script>alert(1)</script>" }));
    }
    const found = this.route(url.pathname);
    return found ? Response.json(found.read(found.parts, url.searchParams)) : refusal(404, "not_found", "There is no such route.");
  }

  private route(path: string): { read: (parts: string[], query: URLSearchParams) => unknown; parts: string[] } | null {
    for (const [template, read] of Object.entries(this.reads)) {
      const pattern = new RegExp(`^${template.replace(/\{[^}]+\}/g, "([^/]+)")}$`);
      const parts = pattern.exec(path)?.slice(1);
      if (parts) return { read: read as (parts: string[], query: URLSearchParams) => unknown, parts };
    }
    return null;
  }

  private write(method: string, path: string, body: Record<string, unknown>): Response {
    if (method === "DELETE") return new Response(null, { status: 204 });
    if (path === "/console/logout") return Response.json({ logout_url: "/console/" });
    if (path === "/api/v1/allocations") {
      const made = fixtures.allocation(99, { state: "requested", name: null, ssh: null });
      this.allocations = [made, ...this.allocations];
      return Response.json(made, { status: 201 });
    }
    if (path === "/api/v1/admin/policy-values") {
      const value: unknown = body["value"];
      return Response.json({ id: fixtures.uuid(851), key: body["key"], value, scope: body["scope"], reason: body["reason"], effective_at: fixtures.ago(0), written_at: fixtures.ago(0), written_by: "user:root" }, { status: 201 });
    }
    if (path.endsWith("/keys")) {
      return Response.json({ id: fixtures.uuid(312), client_id: fixtures.uuid(310), client_secret: "shown-once-3f9a", created_at: fixtures.ago(0) }, { status: 201 });
    }
    return Response.json(this.allocations[0], { status: 202 });
  }
}
