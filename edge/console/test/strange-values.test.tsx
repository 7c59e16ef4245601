// Amounts and names of any kind, on each page that shows them.
import { describe, expect, it } from "vitest";
import { screen, waitFor } from "@testing-library/react";
import type { Schemas } from "../src/api/client.ts";
import { ago, allocation, balance, binding, endpoint, node, payment, posting, recording, serviceAccount, sku, sshKey, STRANGE_NAMES, terminal, uuid, type Role } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";
import { tallWindow } from "./tall-window.ts";

/** A number that JavaScript's are not exact for, which the API sends all the same. */
const exact = (value: bigint) => `exact:${value}`;
const withExact = (body: unknown) => JSON.stringify(body).replace(/"exact:(-?\d+)"/g, "$1");

const digits = (text: string | null | undefined) => text?.replace(/[^\d.-]/g, "") ?? "";

const MICRO = 1_000_000n;
/** Minor units, and how they are read. */
const BALANCES: readonly (readonly [minor: bigint, text: string])[] = [
  [-5n, "-0.05"],
  [-123_456_789_012_345n, "-1234567890123.45"],
  [123_456_789_012_345n, "1234567890123.45"],
  [9_007_199_254_740_993n, "90071992547409.93"],
];

/** Where a page shows the balance: the text beside, or the column. */
const OF_BALANCE: readonly (readonly [page: string, role: Role, address: string, shown: () => Promise<(string | null | undefined)[]>])[] = [
  ["Overview", "user", "/", numbers],
  ["Money", "user", "/money", async () => [...(await numbers()), await cell("Ledger", "Balance")]],
  ["an account", "admin", `/accounts/${uuid(1)}`, async () => [...(await numbers()), await cell("Postings", "Balance")]],
  ["the list of accounts", "admin", "/accounts", async () => [await cell("Accounts", "Available"), await cell("Accounts", "Balance")]],
  ["Fleet", "admin", "/operations", async () => [await cell("Money", "Balances")]],
];

async function numbers(): Promise<(string | null | undefined)[]> {
  const available = (await screen.findByText("Available", { selector: "dt" })).parentElement;
  return [...(available?.querySelectorAll("dd") ?? [])].map(({ textContent }) => textContent);
}

/** The first value of a column. */
async function cell(table: string, column: string): Promise<string | null | undefined> {
  const group = await screen.findByLabelText(table, { selector: ".table-room" });
  return group.querySelector(`td[data-title="${column}"]`)?.textContent;
}

describe.each(OF_BALANCE)("a balance on %s", (_page, role, address, shown) => {
  it.each(BALANCES)("of %s minor units is exact", async (minor, text) => {
    mock.role = role;
    mock.overrides.push(async ({ url, method }) => {
      const at = new URL(url);
      if (method !== "GET" || !at.pathname.startsWith("/api/v1/") || at.pathname === "/api/v1/me") return null;
      const of: Record<string, string> = { balance_minor: exact(minor), available_minor: exact(minor), balance_micro: exact(minor * MICRO), available_micro: exact(minor * MICRO) };
      const body = JSON.parse(await mock.read(at).text(), (name, value: unknown) => of[name] ?? value) as unknown;
      return new Response(withExact(body), { headers: { "Content-Type": "application/json" } });
    });
    openConsole(address);
    const all = await shown();
    expect(all.length).toBeGreaterThan(0);
    for (const one of all) expect(digits(one)).toBe(text);
  });
});

/** A list, the path of its items, and an item with a name. */
const OF_NAMES: readonly (readonly [noun: string, role: Role, address: string, path: string, item: (name: string, index: number) => unknown])[] = [
  ["nodes", "admin", "/nodes", "/api/v1/admin/nodes", (name, index) => ({ ...node(1), id: uuid(3000 + index), name })],
  ["hosts of nodes", "admin", "/nodes", "/api/v1/admin/nodes", (host, index) => ({ ...node(1), id: uuid(3000 + index), name: null, host })],
  ["nodes on the map of GPUs", "admin", "/gpus", "/api/v1/admin/nodes", (name, index) => ({ ...node(1), id: uuid(3000 + index), name })],
  ["SSH keys", "user", "/ssh-keys", "/api/v1/ssh-keys", (name, index) => ({ ...sshKey, id: uuid(3000 + index), name })],
  ["SSH keys of another user", "admin", "/user-keys?user_id=ann", "/api/v1/admin/users/ann/ssh-keys", (name, index) => ({ ...sshKey, id: uuid(3000 + index), name })],
  ["SKUs", "admin", "/skus", "/api/v1/admin/skus", (name, index) => ({ ...sku, id: uuid(3000 + index), name, validation: {}, approvals: [] })],
  ["SKUs in the catalog", "user", "/catalog", "/api/v1/skus", (name, index) => ({ ...sku, id: uuid(3000 + index), name })],
  ["service accounts", "user", "/service-accounts", "/api/v1/service-accounts", (name, index) => ({ ...serviceAccount, id: uuid(3000 + index), name })],
  ["receivers of notifications", "user", "/notifications", "/api/v1/notification-endpoints", (url, index) => ({ ...endpoint, id: uuid(3000 + index), url })],
  ["errors of receivers", "user", "/notifications", "/api/v1/notification-endpoints", (error, index) => ({ ...endpoint, id: uuid(3000 + index), attempts: [{ ...endpoint.attempts[0], error }] })],
  ["allocations", "user", "/allocations", "/api/v1/allocations", (name, index) => allocation(3000 + index, { name })],
  ["users of allocations", "admin", "/allocations", "/api/v1/allocations", (user_id, index) => allocation(3000 + index, { user_id })],
  ["holders of accounts", "admin", "/accounts", "/api/v1/admin/billing/accounts", (user_id, index) => ({ ...balance, id: uuid(3000 + index), user_id })],
  ["organizations with accounts", "admin", "/accounts", "/api/v1/admin/billing/accounts", (org_id, index) => ({ ...balance, id: uuid(3000 + index), user_id: null, org_id })],
  ["subjects of roles", "admin", "/roles", "/api/v1/admin/platform-roles/bindings", (subject, index) => ({ ...binding, id: uuid(3000 + index), subject })],
  ["users of terminals", "admin", "/terminals", "/api/v1/admin/terminal-sessions", (user_id, index) => ({ ...terminal, id: uuid(3000 + index), user_id })],
  ["users of recordings", "admin", "/terminals", "/api/v1/admin/recordings", (user_id, index) => ({ ...recording, id: uuid(3000 + index), user_id })],
  ["browsers of logins", "user", "/sessions", "/api/v1/me/sessions", (user_agent, index) => ({ ...login, id: uuid(3000 + index), user_agent })],
  ["users with logins", "admin", "/logins", "/api/v1/admin/browser-sessions", (user_id, index) => ({ ...login, id: uuid(3000 + index), user_id })],
  ["actors of the audit log", "admin", "/audit", "/api/v1/admin/audit-log", (actor, index) => ({ ...audited, actor, chain: { epoch: 1, shard: 3, seq: index } })],
  ["reasons in the audit log", "admin", "/audit", "/api/v1/admin/audit-log", (reason, index) => ({ ...audited, metadata: { reason }, chain: { epoch: 1, shard: 3, seq: index } })],
  ["users with policy values", "admin", "/policies", "/api/v1/admin/policy-values", (user_id, index) => ({ ...value, id: uuid(3000 + index), scope: { user_id } })],
  ["reasons of policy values", "admin", "/policies", "/api/v1/admin/policy-values", (reason, index) => ({ ...value, id: uuid(3000 + index), reason })],
  ["reasons of payments", "user", "/money", "/api/v1/billing/payments", (reason, index) => ({ ...payment, id: uuid(3000 + index), reason })],
  ["reasons of postings", "user", "/money", "/api/v1/billing/ledger", (reason, index) => ({ ...posting(index), allocation_id: null, reason })],
  ["receivers of other users", "admin", "/announcements", "/api/v1/admin/notification-endpoints", (url, index) => ({ ...endpoint, id: uuid(3000 + index), url, user_id: url })],
];

const login: Schemas["BrowserSession"] = {
  id: uuid(905), user_id: "ann", state: "active", is_current: false, created_at: ago(90), last_seen_at: ago(1), idle_ends_at: ago(-30), ends_at: ago(-600), address: "192.0.2.7", user_agent: "Firefox",
};
const audited = { at: ago(7), actor: "user:root", action: "nodes.quarantine", target: { kind: "node", id: uuid(50) }, correlation_id: "b", metadata: {} };
const value = { id: uuid(850), key: "allocation.max_concurrent_per_user", value: 20, scope: { user_id: "ann" }, reason: "research", effective_at: ago(90), written_at: ago(90), written_by: "user:root" };

function textsOf(root: HTMLElement): Text[] {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const texts: Text[] = [];
  while (walker.nextNode()) texts.push(walker.currentNode as Text);
  return texts;
}

describe("strange names", () => {
  it.each(OF_NAMES)("of %s are text in the direction of their script", async (_noun, role, address, path, item) => {
    tallWindow();
    mock.role = role;
    mock.overrides.push(({ url }) => (new URL(url).pathname === path ? Response.json({ items: STRANGE_NAMES.map(item), next_page: null }) : null));
    openConsole(address);
    await waitFor(() => expect(document.querySelector("main")?.textContent).toContain(STRANGE_NAMES[0]));
    const main = document.querySelector("main") as HTMLElement;
    const texts = textsOf(main);
    for (const name of STRANGE_NAMES) {
      const found = texts.filter(({ data }) => data.includes(name));
      expect(found.length, name).toBeGreaterThan(0);
      // Beside other text, a name would reorder it.
      for (const { parentElement } of found) expect(parentElement?.closest("bdi"), `${name} in ${parentElement?.outerHTML}`).toBeTruthy();
    }
    expect(main.querySelector("img:not([role]), script")).toBeNull();
  });

  it("of a node are its title, and that of the browser's tab", async () => {
    mock.role = "admin";
    for (const [index, name] of STRANGE_NAMES.entries()) {
      const id = uuid(3000 + index);
      mock.overrides.unshift(({ url }) => (new URL(url).pathname === `/api/v1/admin/nodes/${id}` ? Response.json({ ...node(1), id, name }) : null));
      const { unmount } = openConsole(`/nodes/${id}`);
      await waitFor(() => expect(document.title).toBe(`${name.replace(/\s+/g, " ")} · gpuaas`));
      expect(document.querySelector("h1 bdi")?.textContent).toBe(name);
      expect(document.querySelector("main img:not([role]), main script")).toBeNull();
      unmount();
    }
  });
});
