// Roles of one permission each, which no installation has, and each platform role: no page offers them what the service refuses.
import { readFileSync } from "node:fs";
import axe from "axe-core";
import { describe, expect, it } from "vitest";
import { act, fireEvent, waitFor } from "@testing-library/react";
import type { QueryClient } from "@tanstack/react-query";
import type { Schemas } from "../src/api/client.ts";
import { ROLE_FOR, type Permission } from "../src/session/me.ts";
import { allocation, entity, me, node, tree, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";
import { refusal } from "./mock-api.ts";
import { tallWindow } from "./tall-window.ts";

/** What a route needs, the first that matches: its methods, the beginning of its path, and the permission. A route of users without one needs a role alone. */
const NEEDS: readonly (readonly [methods: string, path: RegExp, needs: Permission])[] = [
  ["POST", /^\/admin\/allocations\//, "rescue_allocations"],
  ["GET", /^\/admin\/audit-log/, "read_audit"],
  ["GET", /^\/admin\/billing\//, "see_billing"],
  ["POST", /^\/admin\/billing\/(payments|processor-events)\//, "settle_processor_events"],
  ["POST", /^\/admin\/billing\/accounts/, "adjust_billing"],
  ["GET POST", /^\/admin\/browser-sessions/, "operate_browser_sessions"],
  ["GET POST DELETE PATCH", /^\/admin\/(health-rules|nodes|rollouts|users)/, "manage_nodes"],
  ["GET POST", /^\/admin\/keys/, "rotate_keys"],
  ["GET POST", /^\/admin\/(notification-endpoints|notifications)/, "announce"],
  ["GET POST", /^\/admin\/(alerts|fleet-history|overview|runtime|telemetry)/, "operate_runtime"],
  ["GET POST DELETE", /^\/admin\/platform-roles/, "bind_platform_roles"],
  ["GET POST DELETE", /^\/admin\/polic/, "manage_policy"],
  ["GET", /^\/admin\/skus/, "see_skus"],
  ["POST", /^\/admin\/skus\/[^/]+\//, "approve_skus"],
  ["POST PATCH", /^\/admin\/skus/, "manage_skus"],
  ["GET POST", /^\/admin\/(recordings|terminal-sessions)/, "operate_terminals"],
  ["POST", /^\/allocations$/, "rent"],
  ["POST", /^\/allocations\/[^/]+\/release/, "release"],
  ["PATCH", /^\/allocations\/[^/]+$/, "revise_allocations"],
  ["PUT", /^\/allocations\/[^/]+\/ssh-keys/, "keep_keys"],
  ["DELETE POST", /^\/allocations\/[^/]+\/terminal-/, "open_terminals"],
  ["POST", /^\/billing\/refunds/, "ask_money_back"],
  ["POST", /^\/billing\//, "pay"],
  ["POST", /^\/me\/sessions\//, "keep_browser_sessions"],
  ["DELETE PATCH POST", /^\/notification-endpoints/, "keep_notification_endpoints"],
  ["GET", /^\/recordings\/[^/]+\/asciicast/, "read_recordings"],
  ["DELETE POST", /^\/service-accounts(?!\/token)/, "keep_service_accounts"],
  ["DELETE POST", /^\/ssh-keys/, "keep_keys"],
];

const API = "/api/v1";

function needsOf(method: string, path: string): Permission | null {
  return NEEDS.find(([methods, begin]) => methods.split(" ").includes(method) && begin.test(path.slice(API.length)))?.[2] ?? null;
}

/** The lines of a reviewed table. */
function reviewed(file: string): string[] {
  return readFileSync(file, "utf8").split("\n---\n")[1]?.split("\n").filter(Boolean) ?? [];
}

const [CALLERS = [], ...ACTIONS] = reviewed("../../actors/domain/src/kernel/snapshots/domain__kernel__authz__tests__permission_matrix.snap").map((line) => line.trim().split(/ {2,}/));

/** Whether the service allows a caller of its reviewed table what a permission names. */
function isAllowed(caller: string, permission: Permission): boolean {
  const name = permission.replace(/(?:^|_)(.)/g, (_, letter: string) => letter.toUpperCase());
  return ACTIONS.find(([action]) => action === name)?.[CALLERS.indexOf(caller) + 1] === "yes";
}

it("each route needs the permission that this file has, for every caller of the reviewed tables", () => {
  const callers = { user: "user", "service account": "user's account", auditor: "auditor", "inventory owner": "inventory_owner", "billing operator": "billing_operations" };
  const lines = reviewed("../../tests/it/snapshots/it__permission_matrix__public_api.snap");
  const columns = lines[0]?.split("|").map((column) => column.trim()) ?? [];
  const wrong: string[] = [];
  let compared = 0;
  for (const line of lines.slice(1)) {
    const [, method = "", path = "", rest = ""] = /^(\S+) (\S+)\s+(.*)$/.exec(line) ?? [];
    // What has a token of its own is no part of the console.
    if (!path.startsWith(`${API}/`) || /internal|readyz|healthz|service-accounts\/token/.test(path)) continue;
    const statuses = rest.split("|").map((status) => status.trim());
    for (const [column, caller] of Object.entries(callers)) {
      const needs = needsOf(method, path);
      const status = statuses[columns.indexOf(column)];
      compared += 1;
      if ((status !== "403") !== (needs === null || isAllowed(caller, needs))) wrong.push(`${method} ${path} needs ${needs ?? "a role"}, and answers ${status ?? "nothing"} to the ${column}`);
    }
  }
  expect(wrong).toEqual([]);
  expect(compared).toBeGreaterThan(500);
});

/** What a role may do beside the permission that is looked at, where no page leads to it without. */
const WITH: Partial<Record<Permission, readonly Permission[]>> = {
  manage_skus: ["see_skus"],
  approve_skus: ["see_skus"],
  adjust_billing: ["see_billing"],
  settle_processor_events: ["see_billing"],
};
const ALONE = Object.keys(ROLE_FOR) as Permission[];
const PLATFORM_ROLES: readonly Schemas["PlatformRoleName"][] = ["platform_operations", "inventory_owner", "billing_operations", "auditor"];
const ROLES: readonly (readonly [name: string, permissions: readonly Permission[]])[] = [
  ["none", []],
  ...ALONE.map((one) => [one, [one]] as const),
  ...Object.entries(WITH).map(([one, others]) => [`${one} and ${others.join()}`, [one as Permission, ...others]] as const),
  ...PLATFORM_ROLES.map((role) => [role, ALONE.filter((permission) => isAllowed(role, permission))] as const),
];

/** Pages of users that a permission of administrators changes nothing on. */
const UNCHANGED = ["/console/catalog", "/console/money", "/console/sessions"];

/** Pages in a state that no link of the walk leads to first, for callers who may open them. */
const MORE: readonly (readonly [address: string, needs: Permission | null])[] = [[`/allocations/${allocation(3).id}`, null], [`/nodes/${node(2).id}`, "manage_nodes"]];

/** Stuck entities of each kind that has a page or a remedy. */
const STUCK = [
  ["allocation", "release_failed"], ["node", "quarantined"], ["rollout", "stopped"], ["billing_account", "open"], ["processor_event", "dead"], ["payment", "under_review"], ["terminal_session", "attached"], ["browser_session", "active"],
  ["key_set", "rotating"], ["sku", "active"], ["notification_endpoint", "failing"],
].map(([kind = "", state = ""], index) => ({ ...entity, id: uuid(9000 + index), kind, state, waits_for: kind }));

const main = () => document.querySelector("main") as HTMLElement;

/** What is at the selector, once it is there. By role, a large page takes jsdom a tenth of a second each time. */
const part = (selector: string) =>
  waitFor(() => {
    const found = document.querySelector<HTMLElement>(selector);
    if (!found) throw new Error(`nothing is at ${selector}`);
    return found;
  });

/** Waits until the page has its heading and all its data, or says that it is refused. */
async function shown(queries: QueryClient): Promise<void> {
  await waitFor(() => {
    expect(queries.isFetching()).toBe(0);
    expect(main().querySelector("h1, .none")).toBeTruthy();
    expect(main().querySelector(".loading")).toBeNull();
  });
}

/** Two pages that differ by an id, or by the value of a filter, are the same. */
function pageOf(address: string): string {
  const { pathname, searchParams } = new URL(address, window.location.origin);
  return [pathname.replace(/[0-9a-f]{8}-[0-9a-f-]{27}/g, "ID"), ...[...searchParams.keys()].sort()].join("?");
}

/** Something that each field of the form takes. */
function fill(form: HTMLElement): void {
  const values: Record<string, string> = { currency: "EUR", url: "https://hooks.example.net/x", amount: "1.00", regions: "eu-west-1" };
  for (const field of form.querySelectorAll<HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement>("input:not([type=checkbox]), textarea, select")) {
    if (field.value !== "") continue;
    const option = field instanceof HTMLSelectElement ? ([...field.options].find(({ value }) => value !== "")?.value ?? "") : null;
    const value = option ?? values[field.name] ?? (field.inputMode === "numeric" ? "1" : "x1");
    fireEvent.change(field, { target: { value } });
  }
}

/** What axe has seen, without its ids and age: most pages are the same for many roles. */
const seen = new Set<string>();

/** What axe finds in a part of the page, but for what needs a layout. */
async function findings(of: Element): Promise<string[]> {
  const markup = of.innerHTML.replace(/As of [^<]*|react-aria[\w-]*|:r\w+:|_r_\w+_|[0-9a-f]{4}…?[0-9a-f-]{8,}|\d+/g, "");
  if (seen.has(markup)) return [];
  seen.add(markup);
  const { violations } = await axe.run(of, { rules: { "color-contrast": { enabled: false } }, resultTypes: ["violations"] });
  return violations.flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 200)}`));
}

describe("a role", () => {
  it.each(ROLES)("is offered nothing that is refused, on no page with a finding: %s", async (name, permissions) => {
    tallWindow();
    const platform_roles = PLATFORM_ROLES.filter((role) => role === name || (role === "platform_operations" && name.startsWith("approve_skus")));
    const refused: string[] = [];
    mock.overrides.push(({ url, method }) => {
      const { pathname } = new URL(url);
      if (!pathname.startsWith(API)) return null;
      if (pathname === `${API}/me`) return Response.json({ ...me("user"), permissions: [...permissions], platform_roles } satisfies Schemas["Me"]);
      const needs = needsOf(method, pathname);
      if (needs !== null && !permissions.includes(needs)) {
        refused.push(`${method} ${pathname} needs ${needs}`);
        return refusal(403, "forbidden", "Another role is needed.");
      }
      if (pathname === `${API}/admin/runtime/tree`) return Response.json(tree(new URL(url).searchParams.has("parked") ? [] : STUCK));
      // The form stays open.
      return method === "GET" ? null : refusal(409, "state_conflict", "It is in another state.");
    });
    const { router, queries } = openConsole("/");
    const found: string[] = [];
    const more = MORE.filter(([, needs]) => needs === null || permissions.includes(needs));
    const waiting = ["/console/", ...more.map(([address]) => `/console${address}`)];
    const isOfUsers = permissions.every((one) => isAllowed("user", one)) || platform_roles.length > 0;
    const known = new Set(["/console/", ...(isOfUsers ? [] : UNCHANGED)]);
    for (let address = waiting.shift(); address; address = waiting.shift()) {
      const place = pageOf(address);
      const report = (...lines: string[]) => found.push(...lines.map((line) => `${place}: ${line}`));
      act(() => router.history.push(address as string));
      await waitFor(() => expect(router.state.resolvedLocation?.pathname).toBe(new URL(address as string, window.location.origin).pathname.replace("/console", "")));
      await shown(queries);
      if (/This page needs the role/.test(main().textContent ?? "")) report("it is linked, and refused");
      for (const link of document.querySelectorAll<HTMLAnchorElement>("a[href]")) {
        const to = new URL(link.href);
        if (/^\/terminal\//.test(to.pathname) && !permissions.includes("open_terminals")) report("it offers a terminal");
        if (/^\/recordings\//.test(to.pathname) && !permissions.includes("read_recordings")) report("it offers a recording");
        if (!to.pathname.startsWith("/console/") || to.hash !== "" || known.has(pageOf(to.href))) continue;
        known.add(pageOf(to.href));
        waiting.push(to.pathname + to.search);
      }
      const labels = new Set([...main().querySelectorAll("button[aria-haspopup=dialog]")].map(({ textContent }) => textContent));
      for (const label of labels) {
        fireEvent.click([...main().querySelectorAll("button[aria-haspopup=dialog]")].find(({ textContent }) => textContent === label) as HTMLElement);
        const dialog = await part("[role=dialog]:has(form)");
        const form = dialog.querySelector("form") as HTMLFormElement;
        fill(form);
        fireEvent.submit(form);
        // What the form itself refuses has no correlation id.
        await waitFor(() => expect(dialog.querySelector("form [role=alert]")?.textContent, `${place} ${label}: ${dialog.textContent}`).toContain("0199e3f4-cafe"));
        fireEvent.click([...dialog.querySelectorAll("button")].find(({ textContent }) => textContent === "Cancel") as HTMLElement);
        await waitFor(() => expect(document.querySelector("[role=dialog]")).toBeNull());
      }
      report(...refused.splice(0));
      report(...(await findings(main())));
    }
    found.push(...(await findings(await part("nav"))));
    expect(found).toEqual([]);
    expect(known.size).toBeGreaterThan(5);
  });
});
