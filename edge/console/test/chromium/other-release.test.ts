// The service has the files of another release than the page: no page is blank, nothing typed is lost, and a reload is offered.
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { beforeEach, expect, it } from "vitest";
import { allocation } from "../fixtures.ts";
import { Tab } from "./browser.ts";
import { browser, server } from "./console-in-browser.ts";
import { DIST } from "./server.ts";

let tab: Tab;
beforeEach(async () => {
  await tab?.context.close();
  tab = await Tab.open(browser, server);
  server.missing.clear();
});

const banner = () => tab.page.getByText("the service has another version of the console");
const heading = (name: string) => tab.page.getByRole("heading", { name, level: 1 });

/** What the page complains of, beside the file that is missing. React reports a part that it cannot draw. */
const errors = () => tab.complaints.filter((line) => !line.startsWith("Failed to load resource"));

/** Until React has drawn what follows from the last event. */
const drawn = () => tab.page.evaluate(() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 200))));

/** The files that the document names. */
async function filesOfDocument(): Promise<string[]> {
  const document = await (await fetch(`${server.origin}/console/`)).text();
  return [...document.matchAll(/(?:src|href)="([^"]+\.(?:js|css))"/g)].map((match) => match[1] ?? "");
}

it.each([
  ["script", (name: string) => /\/index-[^/]*\.js$/.test(name)],
  ["file that its script imports", (name: string) => name.includes("jsx-runtime")],
  ["files at all", () => true],
] as const)("a document that has no %s offers a reload in place of a blank page", async (_, isMissing) => {
  const missing = (await filesOfDocument()).filter(isMissing);
  expect(missing).not.toEqual([]);
  missing.forEach((name) => server.missing.add(name));
  await tab.page.goto(`${server.origin}/console/money`);
  await heading("The console has not started").waitFor();
  expect(await tab.findings()).toEqual([]);
  server.missing.clear();
  await tab.page.getByRole("link", { name: "Reload" }).click();
  await heading("Money").waitFor();
  expect(await heading("The console has not started").count()).toBe(0);
});

it("a page whose styles are of another release offers a reload", async () => {
  (await filesOfDocument()).filter((name) => name.endsWith(".css")).forEach((name) => server.missing.add(name));
  await tab.visit("/");
  await banner().waitFor();
  server.missing.clear();
  await tab.page.getByRole("button", { name: "Reload", exact: true }).click();
  await banner().waitFor({ state: "detached" });
  await heading("Overview").waitFor();
});

it("a dialog whose file is of another release leaves the page, and each press of its button offers a reload", async () => {
  server.missing.add("/action-dialog-");
  await tab.visit(`/allocations/${allocation(1).id}`);
  const release = tab.page.getByRole("button", { name: "Release…" });
  await release.click();
  await banner().waitFor();
  await drawn();
  expect([await release.count(), await tab.page.getByRole("dialog").count(), errors()]).toEqual([1, 0, []]);
  // The banner is above a long page.
  await tab.page.evaluate(() => window.scrollTo(0, document.body.scrollHeight));
  await release.click();
  await expect.poll(() => banner().evaluate((text) => text.getBoundingClientRect().top >= 0), { timeout: 60_000 }).toBe(true);
  server.missing.clear();
  await tab.page.getByRole("button", { name: "Reload", exact: true }).click();
  await banner().waitFor({ state: "detached" });
  await release.click();
  await tab.page.getByRole("dialog").waitFor();
});

it("a palette whose file is of another release leaves the page and what was typed", async () => {
  server.missing.add("/palette-");
  await tab.visit("/rent?sku=h100-8");
  await tab.page.getByLabel("Name").fill("typed");
  await tab.page.keyboard.press("Control+k");
  await banner().waitFor();
  await drawn();
  expect(errors()).toEqual([]);
  expect(await tab.page.getByLabel("Name").inputValue()).toBe("typed");
  server.missing.clear();
  await tab.page.getByRole("button", { name: "Reload", exact: true }).click();
  await banner().waitFor({ state: "detached" });
  expect(await tab.page.getByLabel("Name").inputValue()).toBe("typed");
});

it.each([
  [".js", "What was spent cannot be shown before the page is loaded again."],
  [".css", "Spending per day"],
])("a chart whose %s file is of another release leaves the rest of its page", async (kind, instead) => {
  readdirSync(join(DIST, "assets")).filter((name) => name.startsWith("spending-") && name.endsWith(kind)).forEach((name) => server.missing.add(name));
  expect(server.missing.size).toBe(1);
  await tab.visit("/money");
  await banner().waitFor();
  await tab.page.getByText(instead, { exact: true }).first().waitFor();
  await tab.page.getByRole("heading", { name: "Ledger" }).waitFor();
  await tab.page.getByRole("button", { name: "Top up…" }).waitFor();
});

it("a page whose file is of another release says so in its place, and the other pages go on", async () => {
  server.missing.add("/catalog-");
  await tab.visit("/sessions");
  await tab.page.getByRole("link", { name: "Catalog" }).click();
  await banner().waitFor();
  await tab.page.getByText("The file of this page is not there.").waitFor();
  await tab.page.getByRole("link", { name: "Sessions" }).click();
  await heading("Sessions").waitFor();
});

it("a device that is offline is not asked to reload for a file that it cannot get", async () => {
  await tab.visit("/sessions");
  await tab.context.setOffline(true);
  await tab.page.getByText("This device is offline.").waitFor();
  await tab.page.getByRole("link", { name: "Catalog" }).click();
  await tab.page.getByText("The file of this page is not there.").waitFor();
  expect(await banner().count()).toBe(0);
});
