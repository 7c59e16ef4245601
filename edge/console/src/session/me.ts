// Who is logged in, and what they may do. The API decides; the console shows nothing that would be refused.
import { queryOptions, useSuspenseQuery } from "@tanstack/react-query";
import { api, dataOf, session, type Schemas } from "../api/client.ts";
import { pollEvery } from "../api/query-client.ts";
import { openDrafts } from "../ui/use-draft.ts";

/** The actions of `authz.rs` that have a part in the console. */
export type Permission =
  | "manage_nodes"
  | "manage_skus"
  | "see_skus"
  | "approve_skus"
  | "read_audit"
  | "operate_runtime"
  | "rescue_allocations"
  | "manage_policy"
  | "rent"
  | "release"
  | "open_terminals"
  | "pay"
  | "ask_money_back"
  | "read_recordings"
  | "keep_browser_sessions"
  | "keep_keys"
  | "keep_service_accounts"
  | "keep_notification_endpoints"
  | "bind_platform_roles"
  | "rotate_keys"
  | "operate_terminals"
  | "operate_browser_sessions"
  | "see_billing"
  | "adjust_billing"
  | "settle_processor_events"
  | "announce"
  | "revise_allocations";

/** A role of the identity provider's token; a platform role alone is not enough. */
const ANY_ROLE = "user or admin";
const ANY_PERSON = `${ANY_ROLE}, as a person and no service account`;

/** The role that gives a permission, for the sentence where it is missing. */
export const ROLE_FOR: Record<Permission, string> = {
  manage_nodes: "admin",
  manage_skus: "admin",
  see_skus: "admin, platform_operations or inventory_owner",
  approve_skus: "platform_operations or inventory_owner",
  read_audit: "admin or auditor",
  operate_runtime: "admin",
  rescue_allocations: "admin",
  manage_policy: "admin",
  rent: ANY_ROLE,
  release: ANY_ROLE,
  open_terminals: ANY_PERSON,
  pay: ANY_ROLE,
  ask_money_back: ANY_PERSON,
  read_recordings: ANY_PERSON,
  keep_browser_sessions: ANY_PERSON,
  keep_keys: ANY_ROLE,
  keep_service_accounts: ANY_PERSON,
  keep_notification_endpoints: ANY_ROLE,
  bind_platform_roles: "admin, as a person and no service account",
  rotate_keys: "admin, as a person and no service account",
  operate_terminals: "admin",
  operate_browser_sessions: "admin",
  see_billing: "admin or billing_operations",
  adjust_billing: "billing_operations",
  settle_processor_events: "billing_operations",
  announce: "admin",
  revise_allocations: ANY_ROLE,
};

export type Me = Schemas["Me"];

export const meQuery = queryOptions({
  queryKey: ["me"],
  queryFn: async (): Promise<Me> => {
    const me = await dataOf(api.GET("/api/v1/me"));
    session.opened(me.user_id);
    openDrafts(me.user_id);
    return me;
  },
  staleTime: 60_000,
  refetchInterval: pollEvery(60_000),
});

export function useMe(): Me {
  return useSuspenseQuery(meQuery).data;
}

export function may(me: Me, permission: Permission): boolean {
  return me.permissions.includes(permission);
}

export function useMay(): (permission: Permission) => boolean {
  const me = useMe();
  return (permission) => may(me, permission);
}

export function nameOf(me: Me): string {
  return me.username ?? me.email ?? me.user_id;
}
