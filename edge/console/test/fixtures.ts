// Answers of the API, typed by its description: a field that it does not have, or has in another form, is a mistake here.
import type { Schemas } from "../src/api/client.ts";
import type { Me } from "../src/session/me.ts";

const NOW = Date.now();
export const ago = (minutes: number) => new Date(NOW - minutes * 60_000).toISOString();
export const uuid = (number: number) => `0199e3f4-5c1b-7a00-8000-${String(number).padStart(12, "0")}`;

const USER = ["rent", "release", "open_terminals", "read_recordings", "pay", "ask_money_back", "keep_browser_sessions", "keep_keys", "keep_service_accounts", "keep_notification_endpoints", "revise_allocations"];
const ADMIN = [
  ...USER, "manage_nodes", "manage_skus", "see_skus", "read_audit", "operate_runtime", "rescue_allocations", "manage_policy", "bind_platform_roles", "rotate_keys", "operate_terminals",
  "operate_browser_sessions", "see_billing", "adjust_billing", "settle_processor_events", "announce",
];

export type Role = "user" | "admin" | "operator";

/** An operator has the token's role `admin` alone, without a platform role: SKUs are approved by others. */
const ROLES: Record<Role, Pick<Me, "roles" | "platform_roles" | "permissions">> = {
  user: { roles: ["user"], platform_roles: [], permissions: USER },
  admin: { roles: ["user", "admin"], platform_roles: ["platform_operations"], permissions: [...ADMIN, "approve_skus"] },
  operator: { roles: ["admin"], platform_roles: [], permissions: ADMIN },
};

export function me(role: Role): Me {
  return {
    user_id: role === "user" ? "ann" : "root",
    username: role === "user" ? "ann" : "root",
    auth_kind: "user",
    ...ROLES[role],
    token_expires_at: ago(-60),
    session: { id: uuid(900), created_at: ago(90), idle_ends_at: ago(-30), ends_at: ago(-600) },
  };
}

export const balance: Schemas["BillingAccount"] = {
  id: uuid(1),
  state: "open",
  currency: "EUR",
  balance_minor: 125_050,
  balance_micro: 125_050_000_000,
  available_minor: 118_000,
  held_minor: 0,
  next_window_micro: 7_050_000_000,
  accrued_minor: 125,
  burn_minor_per_hour: 2000,
  running: 2,
  is_low: false,
  lasts_until: ago(-3540),
  as_of: ago(0),
  user_id: "ann",
};

export const sku: Schemas["OfferedSku"] = {
  id: uuid(10),
  name: "h100-8",
  status: "active",
  gpu: { vendor: "NVIDIA", model: "H100", count: 8, memory_mib: 81_920 },
  cpu: { model: "AMD EPYC 9654", cores: 96 },
  memory_mib: 1_572_864,
  storage_gib: 7680,
  interconnect: "nvlink",
  allowed_regions: ["eu-west-1", "eu-north-1"],
  price: { amount_minor_per_gpu_hour: 250, currency: "EUR" },
  created_at: ago(90_000),
};

export const alerts: Schemas["Alert"][] = [
  {
    id: "a1", name: "GPUAASReplicaDown", severity: "critical", state: "firing", since: ago(4), summary: "A replica does not answer Prometheus.", runbook_id: "ops.api.degradation",
    labels: { instance: "10.0.0.2:9464", job: "gpuaas" },
  },
  { id: "a2", name: "GPUAASNoFreeGpus", severity: "warning", state: "firing", since: ago(70), summary: "A SKU has no free GPU in a region.", runbook_id: "ops.capacity", labels: { sku: "h100-8", region: "eu-west-1" } },
  { id: "a3", name: "GPUAASWatchdog", severity: "none", state: "firing", since: ago(9000), summary: "It always fires.", runbook_id: "ops.monitoring.watchdog", labels: {} },
  { id: "a4", name: "GPUAASOutboxBacklog", severity: "warning", state: "inhibited", since: ago(3), summary: "Events wait.", runbook_id: "ops.bus.backlog", labels: { job: "gpuaas" } },
];

/** Names as people, and others, write them. */
export const STRANGE_NAMES = ["<img src=x onerror=alert(1)>", "אבג שלום", "名".repeat(255), "zero\u200bwidth", "a".repeat(63)];

export function allocation(number: number, change: Partial<Schemas["Allocation"]> = {}): Schemas["Allocation"] {
  return {
    id: uuid(100 + number),
    name: `training-${number}`,
    sku: "h100-8",
    state: "active",
    state_reason: "provisioned",
    gpu_count: 2,
    devices: [0, 1].map((index) => ({ index, uuid: `GPU-5f0d1c2e-8a77-4f0b-9a34-2d6c1b9e7f1${index}` })),
    further_devices: ["/dev/fuse"],
    price: { amount_minor_per_gpu_hour: 250, currency: "EUR" },
    cost_to_date_minor: 123_456,
    billed_until: ago(1),
    requested_at: ago(200),
    active_at: ago(199),
    attempt: 1,
    generation: 3,
    isolation_model: "user-revoke",
    labels: { team: "vision", env: "dev" },
    overdue: false,
    region_code: "eu-west-1",
    node_id: uuid(50),
    user_id: "ann",
    ssh: {
      host: "gpu-17.example.net",
      port: 2222,
      username: "t-0199e3f4",
      host_key_fingerprint: "SHA256:nThbg6kXUpJWGl7E1IGOCspRomTxdCARLviKw6E5SY8",
      key_fingerprints: ["SHA256:awLufrjqBI9Fx8fOe4VPSG8EbAofMyKsZudqfQggrNU"],
      keys_written: true,
    },
    status_history: [
      { state: "requested", reason: "requested", at: ago(200) },
      { state: "provisioning", reason: "devices_reserved", at: ago(200) },
      { state: "active", reason: "provisioned", at: ago(199) },
    ],
    ...change,
  };
}

export const allocations = [
  allocation(1),
  allocation(2, { name: null, state: "provisioning", state_reason: "devices_reserved", active_at: null, ssh: null, deadline_at: ago(-4), cost_to_date_minor: 0 }),
  allocation(3, { state: "release_failed", state_reason: "no_cleanup_proof", overdue: true }),
  ...STRANGE_NAMES.map((name, index) => allocation(10 + index, { name })),
];

export const sshKey: Schemas["SshKey"] = {
  id: uuid(300),
  name: "laptop",
  fingerprint: "SHA256:awLufrjqBI9Fx8fOe4VPSG8EbAofMyKsZudqfQggrNU",
  key_type: "ssh-ed25519",
  public_key: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE ann",
  is_default: true,
  owner_user_id: "ann",
  created_at: ago(5000),
  created_by: "user:ann",
};

export const serviceAccount: Schemas["ServiceAccount"] = {
  id: uuid(310),
  name: "nightly",
  roles: ["user"],
  keys: [{ id: uuid(311), created_at: ago(4000), created_by: "user:ann" }],
  owner_user_id: "ann",
  created_at: ago(5000),
  created_by: "user:ann",
};

export function posting(number: number): Schemas["LedgerPosting"] {
  return {
    // The newest has the highest.
    number: 1000 - number,
    kind: "usage",
    amount_micro: 400_000_000 * (5 + (number % 4)),
    change_micro: -400_000_000 * (5 + (number % 4)),
    balance_minor: 125_050,
    balance_micro: 125_050_000_000,
    currency: "EUR",
    at: ago(number * 600),
    allocation_id: uuid(101),
  };
}

export const payment: Schemas["Payment"] = {
  id: uuid(400),
  account_id: uuid(1),
  amount_minor: 200_000,
  left_minor: 200_000,
  currency: "EUR",
  state: "deposited",
  payer: "ann",
  refunds: [],
  reversals: [],
  created_at: ago(9000),
};

export const statement: Schemas["MonthlyStatementSummary"] = {
  month: "2026-10",
  currency: "EUR",
  from: "2026-10-01T00:00:00Z",
  until: "2026-11-01T00:00:00Z",
  is_final: true,
  opening_minor: 0,
  opening_micro: 0,
  closing_minor: 125_050,
  closing_micro: 125_050_000_000,
  postings: 812,
};

export const endpoint: Schemas["NotificationEndpoint"] = {
  id: uuid(500),
  kind: "webhook",
  url: "https://hooks.example.net/gpu",
  state: "failing",
  attempts: [{ at: ago(3), event: "allocations.active", message_id: uuid(501), error: "503 Service Unavailable" }],
  created_at: ago(8000),
  created_by: "user:ann",
  dead_letters: 2,
  forgotten: 0,
  waiting: 4,
};

export function node(number: number, change: Partial<Schemas["Node"]> = {}): Schemas["Node"] {
  return {
    id: uuid(50 + number),
    name: `rack-${number}`,
    host: `gpu-${number}.example.net`,
    port: 22,
    sku: "h100-8",
    region_code: "eu-west-1",
    state: "active",
    state_reason: { code: "enrolled", message: "Its agent has enrolled." },
    state_entered_at: ago(3000),
    gpus_free: 6,
    gpus_total: 8,
    gpu_resets: [],
    generation: 9,
    health: { status: "ok", alerts: [], findings: [] },
    inventory: {
      gpus: Array.from({ length: 8 }, (_, index) => ({
        index, uuid: `GPU-5f0d1c2e-8a77-4f0b-9a34-2d6c1b9e7f${number}${index}`, model: "NVIDIA H100 80GB HBM3", memory_mib: 81_559, is_free: index > 1,
        allocation_id: index < 2 ? uuid(101) : null,
      })),
      gpu_source: "nvml", isolates_devices: true, cpu_model: "AMD EPYC 9654 96-Core Processor", cpu_cores: 192, memory_mib: 1_548_000, storage_gib: 7153, driver_version: "550.90.07", tenant_devices: [],
    },
    hardware: [
      { item: "GPUs", expected: "8", found: "8", is_enough: true },
      { item: "model of the GPUs", expected: "NVIDIA H100 80GB HBM3", found: "NVIDIA H100 80GB HBM3", is_enough: true },
      { item: "memory of each GPU", expected: "81559 MiB", found: "81559 MiB", is_enough: true },
      { item: "storage", expected: "7680 GiB", found: "7153 GiB", is_enough: false },
      { item: "driver", expected: "550.54 or later", found: null, is_enough: null },
    ],
    labels: { rack: "a7" },
    onboarding_mode: "manual",
    overdue: false,
    quarantine_holds: [],
    ssh_key_fingerprint: sshKey.fingerprint,
    ssh_username: "ops",
    created_at: ago(9000),
    updated_at: ago(1),
    agent: { version: "0.1.0", protocol: 7, boot_id: uuid(601), last_seen_at: ago(0) },
    ...change,
  };
}

export const nodes = [
  node(0, {
    state: "quarantined",
    state_reason: { code: "health", message: "A finding holds it." },
    unschedulable_reason: "it is quarantined",
    quarantine_holds: [{ code: "health", message: "GPU 3 has fallen off the bus.", author: "system:health", since_at: ago(60) }],
    health: {
      status: "critical",
      alerts: [],
      findings: [
        {
          id: uuid(602), gpu_uuid: "GPU-5f0d1c2e-8a77-4f0b-9a34-2d6c1b9e7f03", probe: "xid", code: "79", meaning: "GPU has fallen off the bus", detail: "Xid 79 on GPU 3", cause: "hardware", classes: ["quarantine", "evacuate"],
          repair: "operator", count: 1, boot_id: uuid(601), first_at: ago(61), last_at: ago(61), opened_at: ago(60),
        },
      ],
    },
  }),
  node(1, { gpu_resets: [{ gpu_uuid: "GPU-5f0d1c2e-8a77-4f0b-9a34-2d6c1b9e7f15", phase: "validating", begun_at: ago(2) }] }),
  node(2, {
    state: "registered", agent: null, gpus_free: 0, inventory: null, hardware: node(2).hardware.map((line) => ({ ...line, found: null, is_enough: null })),
    state_reason: { code: "registered", message: "Registered; issue an enrollment token next." } }),
];

export const entity: Schemas["EntityNode"] = {
  kind: "allocation",
  id: uuid(103),
  state: "release_failed",
  status: "awake",
  overdue: true,
  waits_for: "agent has not confirmed the clean-up",
  deadline_at: ago(20),
  since: ago(50),
  member: uuid(700),
  member_name: "replica-1",
  mailbox_depth: 0,
  restarts: 1,
  shard: 12,
  version: 8,
};

export function tree(entities: Schemas["EntityNode"][]): Schemas["Tree"] {
  return {
    entities,
    entities_by_kind: { allocation: { active: 2, release_failed: 1 }, browser_session: { active: 1 } },
    members: [
      {
        id: uuid(700), name: "replica-1", awake: 40, mailbox_depth: 0, shards: 128, started_at: ago(5000), version: "0.1.0",
        workers: [
          { name: "outbox", what: "publishes committed events", state: "running", under: "bus", restarts: 0, restartable: true, since: ago(5000) },
          { name: "accrual", what: "bills running allocations", state: "backing_off", under: "money", restarts: 3, restartable: true, since: ago(2), last_error: "the store does not answer" },
        ],
      },
    ],
    overdue: 1,
    parked: 0,
    silent: [],
    truncated: false,
    next_page: null,
  };
}

export const rollout: Schemas["Rollout"] = {
  id: uuid(1000), state: "stopped", stage: "waves", state_since: ago(12), created_at: ago(90), created_by: "user:root", reason: "fixes the probe of Xid 79",
  digest: `sha256:${"0f".repeat(32)}`, canary: 1, max_unavailable: 2, soak_seconds: 600, include_held: false, overdue: false, all_nodes_read: true, updated: 14, failed: 1, skipped: 2, waiting: 7,
  in_flight: [uuid(51)], failures: [{ node_id: uuid(50), reason: "did_not_start" }], skips: [], selector: { region_code: "eu-west-1" }, stopped_by: { node_id: uuid(50), reason: "did_not_start" },
};

export const healthRules: Schemas["HealthRules"] = {
  items: [
    { probe: "xid", code: "79", scope: "gpu", classes: ["quarantine", "evacuate"], cause: "hardware", repair: "operator", meaning: "GPU has fallen off the bus", tenant_message: "A GPU of yours has failed." },
    { probe: "xid", code: "13", scope: "gpu", classes: [], cause: "tenant", repair: "none", meaning: "Graphics engine exception", tenant_message: "", overridden_by: "xid/1*" },
    { probe: "disk", code: "full", scope: "machine", classes: ["warn"], cause: "software", repair: "operator", meaning: "A file system is nearly full", tenant_message: "" },
  ],
  overrides: [
    { pattern: "xid/1*", classes: ["warn"], cause: "tenant", repair: "none", tenant_message: "", reason: "we want to see them", written_at: ago(4000), written_by: "user:root" },
  ],
};

export const terminal: Schemas["TerminalSession"] = {
  id: uuid(1100), allocation_id: uuid(101), node_id: uuid(50), user_id: "ann", state: "attached", attachments: 1, opened_at: ago(14), ends_at: ago(-600), recording: "best-effort",
};

export const recording: Schemas["Recording"] = {
  id: uuid(1150), allocation_id: uuid(101), node_id: uuid(50), user_id: "ann", created_at: ago(700), updated_at: ago(690), duration_ms: 540_000, bytes: 88_000, complete: true, lost_bytes: 0,
};

export const processorEvent: Schemas["ProcessorEvent"] = {
  id: uuid(1200), event_id: "evt_1PqXyz", event_type: "charge.dispute.created", state: "dead", attempts: 12, last_error: "the payment pi_3Pq is not known here", received_at: ago(700), overdue: false,
};

const signingKey = (number: number, phase: Schemas["KeyPhase"], dependents: number | null): Schemas["Key"] => ({
  key_id: uuid(1300 + number), phase, since: ago(number * 9000), made_at: ago(number * 9000 + 60), public: "MCowBQYDK2VwAyEA", dependents, until: phase === "grace" ? ago(-900) : null,
});

export const keys: Schemas["AllKeys"] = {
  sets: [
    { purpose: "task_signing", version: 7, keys: [signingKey(1, "staged", 0), signingKey(2, "active", 24), signingKey(3, "grace", 3)] },
    { purpose: "service_tokens", version: 2, keys: [signingKey(4, "active", 310)] },
  ],
  at_rest: { version: 3, keys: [{ key_id: "ring-2026-10", phase: "active", sealed: 41_200, since: ago(50_000) }, { key_id: "ring-2026-04", phase: "grace", sealed: 12, since: ago(50_000) }] },
  replicas: [{ name: "replica-1", answers: true, seals_with: "ring-2026-10", versions: { task_signing: 7, service_tokens: 2 } }],
};

export const binding: Schemas["PlatformRoleBinding"] = {
  id: uuid(1400), subject: "eve", role: "inventory_owner", reason: "runs the hardware team", bound_by: "user:root", bound_at: ago(90_000),
};

export const fleet: Schemas["FleetReport"] = {
  at: ago(0),
  items: [
    {
      sku: "h100-8", sku_id: sku.id, region_code: "eu-west-1", nodes: 3, reporting: 2, silent: 1, cpu: { cores: 384, utilization_percent: 31.4 }, memory: { total_mib: 3_096_000, used_mib: 1_200_000 },
      storage: { total_gib: 14_306, used_gib: 5100 }, gpus: { count: 16, memory_total_mib: 1_304_944, memory_used_mib: 700_000, power_watts: 6200, temperature_celsius_max: 71, utilization_percent: 64.2 },
    },
  ],
  silent_members: [],
  silent_nodes: { count: 1, nodes: [] },
};

const gpusOfHour = (region_code: string, gpus_held: number): Schemas["FleetHourGpus"] => ({ sku_id: sku.id, sku: "h100-8", region_code, gpus_total: 16, gpus_held, gpus_free: 12 - gpus_held, gpus_unavailable: 4 });

/** Four hours: one that was measured, one without a member, one without a rental, and one that runs. */
export const fleetHistory: Schemas["FleetHistory"] = {
  from: "2026-11-29T08:00:00Z",
  until: "2026-11-29T12:00:00Z",
  hours: [
    {
      hour: "2026-11-29T08:00:00Z", gpus: [gpusOfHour("eu-west-1", 8), gpusOfHour("eu-north-1", 4)], rentals: { begun: 3, active_after_seconds_p50: 31.5, active_after_seconds_p95: 90 },
      revenue: [{ currency: "EUR", revenue_micro: 2_500_000_000 }],
    },
    { hour: "2026-11-29T09:00:00Z", gpus: null, rentals: { begun: 0, active_after_seconds_p50: null, active_after_seconds_p95: null }, revenue: [{ currency: "EUR", revenue_micro: 2_000_000_000 }] },
    { hour: "2026-11-29T10:00:00Z", gpus: [gpusOfHour("eu-west-1", 12), gpusOfHour("eu-north-1", 0)], rentals: { begun: 0, active_after_seconds_p50: null, active_after_seconds_p95: null }, revenue: [] },
    { hour: "2026-11-29T11:00:00Z", gpus: [gpusOfHour("eu-west-1", 12), gpusOfHour("eu-north-1", 0)], rentals: null, revenue: null },
  ],
};

export const statementLines: Schemas["MonthlyStatementLine"][] = [
  { kind: "usage", allocation_id: uuid(101), sku: "h100-8", gpu_count: 2, postings: 640, together: 1, amount_micro: 40_000_000_000, change_micro: -40_000_000_000, user_id: "ann" },
  { kind: "deposit", postings: 1, together: 1, amount_micro: 200_000_000_000, change_micro: 200_000_000_000 },
];
