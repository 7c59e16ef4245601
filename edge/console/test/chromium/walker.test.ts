// Follows every link for each role, and opens every dialog; and the main jobs by the keyboard alone.
import { beforeEach, expect, it } from "vitest";
import { allocation } from "../fixtures.ts";
import { Tab } from "./browser.ts";
import { browser, server } from "./console-in-browser.ts";

let tab: Tab;
beforeEach(async () => {
  await tab?.context.close();
  tab = await Tab.open(browser, server);
  server.mock.sent.length = 0;
});

/** The addresses of one page: those that differ by an id or a filter's value are the same page. */
const pageOf = (address: string) => {
  const url = new URL(address);
  const ids = url.pathname.replace(/[0-9a-f]{8}-[0-9a-f-]{27}/g, "ID");
  return [ids, ...[...url.searchParams.keys()].sort()].join("?");
};

/** An operator sees what an administrator sees; the dialogs of users and administrators are opened in pages.test.ts, and over the service by its walker. */
const WALKS = [
  { role: "user", axe: true, opensDialogs: false },
  { role: "admin", axe: false, opensDialogs: false },
  { role: "operator", axe: true, opensDialogs: true },
] as const;

it.each(WALKS)("every link of the role $role, and its dialogs, open without a message", async ({ role, axe, opensDialogs }) => {
  server.mock.role = role;
  const found: string[] = [];
  const waiting = [`${server.origin}/console/`];
  const known = new Set(waiting.map(pageOf));
  let dialogs = 0;
  for (let address = waiting.shift(); address; address = waiting.shift()) {
    await tab.page.goto(address);
    await tab.ready();
    const place = pageOf(address);
    const heading = await tab.page.locator("main h1").first().textContent();
    const report = (lines: string[], where = "") => found.push(...lines.map((line) => `${place}${where}: ${line}`));
    if (!heading || /no such page|cannot be shown/.test(heading)) report([`its heading is ${heading}`]);
    if (axe) report(await tab.findings());
    const links = await tab.page.locator("a[href]").evaluateAll((all) => all.map((link) => (link as HTMLAnchorElement).href));
    for (const link of links) {
      if (!link.startsWith(`${server.origin}/console/`) || link.includes("#") || known.has(pageOf(link))) continue;
      known.add(pageOf(link));
      waiting.push(link);
    }
    const buttons = tab.page.locator('button[aria-haspopup="dialog"]');
    for (const label of opensDialogs ? new Set(await buttons.allTextContents()) : []) {
      await buttons.filter({ hasText: label }).first().click();
      await tab.page.waitForSelector('[role="dialog"] .consequences');
      await tab.closeDialog();
      dialogs += 1;
      report(tab.complaints.splice(0), ` ${label}`);
    }
    report(tab.complaints.splice(0));
  }
  expect(found.join("\n")).toBe("");
  // A dialog that is closed has sent nothing.
  expect(server.mock.sent).toEqual([]);
  expect(known.size).toBeGreaterThan(role === "user" ? 9 : 15);
  if (opensDialogs) expect(dialogs).toBeGreaterThan(15);
});

it("the main job is done by the keyboard alone: rent, open the terminal, release", async () => {
  server.mock.role = "user";
  const { page } = tab;
  await tab.visit("/");
  await tab.goBy("c", "/catalog");
  await tab.tabTo(page.getByRole("link", { name: "Rent h100-8" }));
  await page.keyboard.press("Enter");
  await tab.arrived("/rent");
  await tab.tabTo(page.getByLabel("Name"));
  await page.keyboard.type("by-keyboard");
  await tab.tabTo(page.getByRole("button", { name: "Rent", exact: true }));
  await page.keyboard.press("Space");
  await tab.arrived("/allocations/");
  const id = new URL(page.url()).pathname.split("/").at(-1) ?? "";
  server.mock.allocations = server.mock.allocations.map((rented) => (rented.id === id ? allocation(99) : rented));
  server.notify("provisioning.active", { allocation_id: id, state: "active" });
  await tab.tabTo(page.getByRole("link", { name: "Open a terminal" }));
  expect(await page.evaluate(() => (document.activeElement as HTMLAnchorElement).pathname)).toBe(`/terminal/${id}`);
  await tab.tabTo(page.getByRole("button", { name: "Release…" }));
  await page.keyboard.press("Enter");
  const dialog = page.getByRole("dialog");
  await tab.tabTo(dialog.getByRole("button", { name: "Release" }));
  await page.keyboard.press("Enter");
  await dialog.waitFor({ state: "detached" });
  // The focus is where it was before the dialog.
  await expect.poll(() => page.evaluate(() => document.activeElement?.textContent), { timeout: 60_000 }).toBe("Release…");
  expect(server.mock.sent.map(({ path }) => path)).toEqual(["/api/v1/allocations", `/api/v1/allocations/${id}/release`]);
  expect(tab.complaints).toEqual([]);
});

it("an operator repairs a stuck allocation by the keyboard alone", async () => {
  server.mock.role = "operator";
  const { page } = tab;
  await tab.visit("/");
  await tab.goBy("x", "/stuck");
  await tab.tabTo(page.getByRole("link", { name: "Its page" }));
  await page.keyboard.press("Enter");
  await tab.arrived("/allocations/");
  await tab.tabTo(page.getByRole("button", { name: "Retry the release…" }));
  await page.keyboard.press("Enter");
  const dialog = page.getByRole("dialog");
  await tab.tabTo(dialog.getByLabel("Reason"));
  await page.keyboard.type("the node is back");
  await page.keyboard.press("Enter");
  await dialog.waitFor({ state: "detached" });
  const id = new URL(page.url()).pathname.split("/").at(-1) ?? "";
  expect(server.mock.sent.map(({ path, body }) => [path, body])).toEqual([[`/api/v1/admin/allocations/${id}/retry-release`, { reason: "the node is back" }]]);
  expect(tab.complaints).toEqual([]);
});
