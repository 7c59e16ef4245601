// The pages of the console: their place in the navigation, the permission that each needs, and its shortcut.
import type { Permission } from "../session/me.ts";

export interface Place {
  to: string;
  title: string;
  needs?: Permission;
  /** Pressed after `g`. */
  key: string;
}

export interface Group {
  title: string;
  places: readonly Place[];
}

export const NAVIGATION: readonly Group[] = [
  {
    title: "Renting",
    places: [
      { to: "/", title: "Overview", key: "o" },
      { to: "/catalog", title: "Catalog", key: "c" },
      { to: "/allocations", title: "Allocations", key: "a" },
      { to: "/ssh-keys", title: "SSH keys", needs: "keep_keys", key: "k" },
      { to: "/service-accounts", title: "Service accounts", needs: "keep_service_accounts", key: "v" },
      { to: "/money", title: "Money", key: "m" },
      { to: "/notifications", title: "Notifications", needs: "keep_notification_endpoints", key: "n" },
      { to: "/sessions", title: "Sessions", key: "s" },
    ],
  },
  {
    title: "Administration",
    places: [
      { to: "/nodes", title: "Nodes", needs: "manage_nodes", key: "d" },
      { to: "/gpus", title: "GPUs", needs: "manage_nodes", key: "1" },
      { to: "/health", title: "Health", needs: "manage_nodes", key: "h" },
      { to: "/rollouts", title: "Rollouts", needs: "manage_nodes", key: "r" },
      { to: "/skus", title: "SKUs", needs: "see_skus", key: "u" },
      { to: "/policies", title: "Policies", needs: "manage_policy", key: "p" },
      { to: "/accounts", title: "Accounts", needs: "see_billing", key: "b" },
      { to: "/payment-events", title: "Payment events", needs: "see_billing", key: "e" },
    ],
  },
  {
    title: "Access control",
    places: [
      { to: "/terminals", title: "Terminals", needs: "operate_terminals", key: "w" },
      { to: "/logins", title: "Logins", needs: "operate_browser_sessions", key: "i" },
      { to: "/user-keys", title: "Keys of users", needs: "manage_nodes", key: "j" },
      { to: "/roles", title: "Roles", needs: "bind_platform_roles", key: "q" },
      { to: "/keys", title: "Keys", needs: "rotate_keys", key: "y" },
      { to: "/audit", title: "Audit log", needs: "read_audit", key: "l" },
      { to: "/requests", title: "Requests", needs: "read_audit", key: "3" },
    ],
  },
  {
    title: "Operations",
    places: [
      { to: "/operations", title: "Fleet", needs: "operate_runtime", key: "f" },
      { to: "/tree", title: "Tree", needs: "operate_runtime", key: "t" },
      { to: "/stuck", title: "Stuck", needs: "operate_runtime", key: "x" },
      { to: "/alerts", title: "Alerts", needs: "operate_runtime", key: "2" },
      { to: "/announcements", title: "Announcements", needs: "announce", key: "z" },
    ],
  },
];

/** The groups with the places that the caller may open. */
export function placesFor(may: (permission: Permission) => boolean): Group[] {
  return NAVIGATION.map((group) => ({ ...group, places: group.places.filter((place) => !place.needs || may(place.needs)) })).filter(
    (group) => group.places.length > 0,
  );
}
