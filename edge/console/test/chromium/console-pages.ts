// The pages of the console with their addresses in the mocked control plane, and the browser that opens them.
import { existsSync } from "node:fs";
import { allocation, node, uuid } from "../fixtures.ts";

const NAMES = ["chromium", "chromium-browser", "google-chrome"];
export const EXECUTABLE = (process.env["PATH"] ?? "").split(":").flatMap((folder) => NAMES.map((name) => `${folder}/${name}`)).find(existsSync) ?? "chromium";

export const USER_PAGES: Record<string, string> = {
  overview: "/",
  catalog: "/catalog",
  rent: "/rent?sku=h100-8",
  allocations: "/allocations",
  allocation: `/allocations/${allocation(1).id}`,
  "ssh-keys": "/ssh-keys",
  "service-accounts": "/service-accounts",
  money: "/money",
  notifications: "/notifications",
  sessions: "/sessions",
};
export const ADMIN_PAGES: Record<string, string> = {
  "gpu-map": "/gpus",
  health: "/health",
  rollouts: "/rollouts",
  rollout: `/rollouts/${uuid(1000)}`,
  onboarding: `/nodes/${node(2).id}`,
  accounts: "/accounts",
  account: `/accounts/${uuid(1)}`,
  "payment-events": "/payment-events",
  terminals: "/terminals",
  logins: "/logins",
  "user-keys": "/user-keys?user_id=ann",
  roles: "/roles",
  keys: "/keys",
  announcements: "/announcements",
  nodes: "/nodes",
  node: `/nodes/${node(0).id}`,
  skus: "/skus",
  policies: "/policies?key=allocation.max_concurrent_per_user",
  audit: "/audit",
  requests: "/requests?correlation_id=b",
  operations: "/operations",
  tree: "/tree",
  stuck: "/stuck",
  alerts: "/alerts",
  "failed-release": `/allocations/${allocation(3).id}`,
  entity: `/entities/allocation/${uuid(103)}`,
};
