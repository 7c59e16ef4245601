// The pages and their addresses. Filters, pages and orders of lists are in the address, and what is opened of them.
import type { QueryClient } from "@tanstack/react-query";
import { createRootRouteWithContext, createRoute, createRouter, lazyRouteComponent } from "@tanstack/react-router";
import { Shell } from "./layout/shell.tsx";
import { LoggedIn } from "./pages/logged-in.tsx";
import { LogIn } from "./pages/log-in.tsx";
import { ApiFailure } from "./api/failure.ts";
import { usePageTitle } from "./ui/page-title.ts";
import { Problem } from "./ui/problem.tsx";
import { meQuery } from "./session/me.ts";
import { useLogOut } from "./session/use-log-out.ts";

interface Context {
  queries: QueryClient;
}

/** What a list's address may have: texts, each bounded. */
export type Search = Readonly<Record<string, string | undefined>>;

function searchOf(...names: string[]) {
  return (raw: Record<string, unknown>): Search =>
    Object.fromEntries(
      ["page", ...names].flatMap((name) => {
        const value = raw[name];
        return (typeof value === "string" || typeof value === "number" || typeof value === "boolean") && value !== ""
          ? [[name, String(value).slice(0, 2048)]]
          : [];
      }),
    );
}

const root = createRootRouteWithContext<Context>()({
  notFoundComponent: NotFound,
});

function NotFound() {
  usePageTitle("No such page");
  return (
    <div className="none">
      <h1>There is no such page</h1>
      <p>Choose one in the navigation.</p>
    </div>
  );
}

const loggedIn = createRoute({ getParentRoute: () => root, path: "/logged-in", component: LoggedIn });

const shell = createRoute({
  getParentRoute: () => root,
  id: "shell",
  beforeLoad: ({ context }) => context.queries.ensureQueryData(meQuery),
  component: Shell,
  errorComponent: ({ error }) => (error instanceof ApiFailure && error.status === 401 ? <LogIn /> : <Broken error={error} />),
});

function Broken({ error }: { error: unknown }) {
  usePageTitle("Not shown");
  const [logOut, failure] = useLogOut();
  return (
    <div className="alone">
      <h1>The console cannot be shown</h1>
      <Problem error={error} again={() => window.location.reload()} />
      {/* A user without a role logs in as another one. */}
      <p>
        <button type="button" onClick={logOut}>
          Log out
        </button>
      </p>
      {failure !== null && <Problem error={failure} />}
    </div>
  );
}

/** Nothing reloads the page by itself, which would take what was typed elsewhere on it. */
async function loaded(load: () => Promise<unknown>): Promise<unknown> {
  const found = await load();
  if (found === undefined) throw new Error("The file of this page is not there. Reload the console, or go on with another page.");
  return found;
}

const page = (path: string, load: () => Promise<Record<string, unknown>>, ...search: string[]) =>
  createRoute({
    getParentRoute: () => shell,
    path,
    validateSearch: searchOf(...search),
    // eslint-disable-next-line @typescript-eslint/no-explicit-any
    component: lazyRouteComponent(() => loaded(load) as Promise<{ default: any }>),
    errorComponent: ({ error }) => <Problem error={error} again={() => window.location.reload()} />,
  });

/** Of the caller for whom a policy is resolved. */
const SCOPES = ["user_id", "project_id", "org_id", "plan"];

const pages = [
  page("/", () => import("./pages/overview.tsx")),
  page("/catalog", () => import("./pages/catalog.tsx"), "sort"),
  page("/rent", () => import("./pages/rent.tsx"), "sku", "region"),
  page("/allocations", () => import("./pages/allocations.tsx"), "state", "sku", "name", "label", "user_id"),
  page("/allocations/$id", () => import("./pages/allocation.tsx"), "recordings_page"),
  page("/ssh-keys", () => import("./pages/ssh-keys.tsx")),
  page("/service-accounts", () => import("./pages/service-accounts.tsx")),
  page("/money", () => import("./pages/money.tsx"), "kind", "allocation_id", "month", "payments_page"),
  page("/notifications", () => import("./pages/notifications.tsx")),
  page("/sessions", () => import("./pages/sessions.tsx")),
  page("/nodes", () => import("./pages/nodes.tsx"), "state", "sku", "name", "label"),
  page("/nodes/$id", () => import("./pages/node.tsx"), "reports_page"),
  page("/gpus", () => import("./pages/gpu-map.tsx"), "state", "sku", "sort"),
  page("/health", () => import("./pages/health-rules.tsx"), "probe", "class"),
  page("/rollouts", () => import("./pages/rollouts.tsx"), "state"),
  page("/rollouts/$id", () => import("./pages/rollout.tsx")),
  page("/terminals", () => import("./pages/terminals.tsx"), "state", "user_id", "recordings_page"),
  page("/accounts", () => import("./pages/accounts.tsx"), "user_id", "org_id"),
  page("/accounts/$id", () => import("./pages/account.tsx"), "month", "payments_page"),
  page("/payment-events", () => import("./pages/processor-events.tsx"), "state", "event_id"),
  page("/user-keys", () => import("./pages/user-keys.tsx"), "user_id"),
  page("/roles", () => import("./pages/platform-roles.tsx"), "subject", "role"),
  page("/logins", () => import("./pages/all-sessions.tsx"), "state", "user_id"),
  page("/announcements", () => import("./pages/announcements.tsx"), "state", "user_id"),
  page("/keys", () => import("./pages/keys.tsx")),
  page("/skus", () => import("./pages/skus.tsx"), "status"),
  page("/policies", () => import("./pages/policies.tsx"), "key", ...SCOPES),
  page("/audit", () => import("./pages/audit.tsx"), "actor", "action", "target_kind", "target_id", "correlation_id", "from", "until"),
  page("/requests", () => import("./pages/requests.tsx"), "correlation_id"),
  page("/operations", () => import("./pages/operations.tsx"), "sort"),
  page("/tree", () => import("./pages/supervision-tree.tsx"), "kind", "state", "overdue", "parked"),
  page("/alerts", () => import("./pages/alerts.tsx")),
  page("/stuck", () => import("./pages/stuck-entities.tsx"), "sort"),
  page("/entities/$kind/$id", () => import("./pages/entity.tsx")),
];

export function newRouter(queries: QueryClient) {
  return createRouter({
    routeTree: root.addChildren([loggedIn, shell.addChildren(pages)]),
    basepath: "/console",
    context: { queries },
    defaultPreload: "intent",
    scrollRestoration: true,
    defaultPendingComponent: () => (
      <p className="loading" role="status">
        Loading…
      </p>
    ),
  });
}
