// Every page in a real Chromium: no finding of axe, no complaint of the browser, nothing wider than the window.
import { mkdirSync, readdirSync } from "node:fs";
import { afterAll, beforeAll, beforeEach, expect, it } from "vitest";
import type { Browser } from "playwright-core";
import { complaint } from "../gpuctl.ts";
import { compareTree } from "./accessibility-tree.ts";
import { launch, Tab, WIDE } from "./browser.ts";
import { linesOf } from "./command-lines.ts";
import { ADMIN_PAGES, USER_PAGES } from "./console-pages.ts";
import { startConsole, type ConsoleServer } from "./server.ts";

/** Where the pictures of the pages are written, if anywhere. */
const PICTURES = process.env["GPUAAS_CONSOLE_PICTURES"];
/** A page as it is first, then dark, in 320 px, and in the colours of a system with high contrast. */
const LOOKS = [
  { look: "light", media: { colorScheme: "light", forcedColors: "none", reducedMotion: "no-preference" }, viewport: WIDE, axe: "axe.run()" },
  { look: "dark", media: { colorScheme: "dark" }, viewport: WIDE, axe: 'axe.run({ runOnly: ["color-contrast"] })' },
  { look: "narrow", media: { colorScheme: "light" }, viewport: { width: 320, height: 700 }, axe: "axe.run()" },
  { look: "forced", media: { forcedColors: "active", reducedMotion: "reduce" }, viewport: WIDE, axe: null },
] as const;

let server: ConsoleServer;
let browser: Browser;
let tab: Tab | undefined;
let page: Tab["page"];
let complaints: string[];
let asked: string[];

beforeAll(async () => {
  server = await startConsole();
  browser = await launch();
  if (PICTURES) mkdirSync(PICTURES, { recursive: true });
});
afterAll(async () => {
  await browser?.close();
  await server?.close();
});

async function openBrowser(): Promise<void> {
  await tab?.context.close();
  tab = await Tab.open(browser, server);
  ({ page, complaints, asked } = tab);
}

beforeEach(() => {
  server.mock.role = "user";
  server.mock.hasSession = true;
  server.mock.overrides.length = 0;
  server.missing.clear();
  server.streams.forEach((stream) => stream.destroy());
  server.streamsOpened = 0;
});

async function visit(address: string): Promise<void> {
  await tab?.visit(address);
}

async function inspect(name: string, look: string, run: string | null = "axe.run()"): Promise<string[]> {
  if (PICTURES) await page.screenshot({ path: `${PICTURES}/${name}-${look}.png`, fullPage: true });
  const found = run === null ? [] : ((await tab?.findings(run)) ?? []);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  if (wide > 0) found.push(`it is ${wide} px wider than the window`);
  return [...found, ...complaints.splice(0)].map((line) => `${name}, ${look}: ${line}`);
}

it.each([
  ["user", USER_PAGES],
  ["admin", ADMIN_PAGES],
] as const)("pages of the role %s have no finding in any look", async (role, pages) => {
  await openBrowser();
  server.mock.role = role;
  const found: string[] = [];
  for (const [name, address] of Object.entries(pages)) {
    await visit(address);
    // The title follows the heading.
    const titled = page.waitForFunction(() => document.title === `${document.querySelector("main h1")?.textContent ?? ""} · gpuaas`);
    await titled.catch(async () => found.push(`${name}: its title is ${await page.title()}`));
    await compareTree(page, "main", name);
    for (const { look, media, viewport, axe } of LOOKS) {
      await page.emulateMedia(media);
      await page.setViewportSize(viewport);
      found.push(...(await inspect(name, look, axe)));
    }
    await page.emulateMedia(LOOKS[0].media);
  }
  await compareTree(page, "nav", `navigation-of-${role}`);
  expect(found.join("\n")).toBe("");
  expect(asked.filter((url) => !url.startsWith(server.origin))).toEqual([]);
});

/** Those without the frame: before the login, and at the end of one in a small window. */
const ALONE: Record<string, string> = { "log-in": "/", "logged-in": "/logged-in" };

it("pages before and after the login have no finding in any look", async () => {
  await openBrowser();
  server.mock.hasSession = false;
  // The last page of a login closes its window.
  await page.addInitScript(() => (window.close = () => {}));
  const found: string[] = [];
  for (const [name, address] of Object.entries(ALONE)) {
    await visit(address);
    // The browser reports the answer that leads to the login.
    complaints.splice(0).filter((line) => !/\b401\b|The session has ended/.test(line)).forEach((line) => found.push(`${name}: ${line}`));
    await compareTree(page, "main", name);
    for (const { look, media, viewport, axe } of LOOKS) {
      await page.emulateMedia(media);
      await page.setViewportSize(viewport);
      found.push(...(await inspect(name, look, axe)));
    }
    await page.emulateMedia(LOOKS[0].media);
  }
  expect(found.join("\n")).toBe("");
});

// They are written at the end of this file's run.
it.skipIf(process.env["INSTA_UPDATE"])("each reviewed accessibility tree is that of a page", () => {
  const names = [...Object.keys({ ...USER_PAGES, ...ADMIN_PAGES, ...ALONE }), "navigation-of-user", "navigation-of-admin"];
  const files = readdirSync(new URL("snapshots", import.meta.url));
  expect(files.toSorted()).toEqual(names.map((name) => `${name}.yaml`).toSorted());
});

it.each(["user", "admin"] as const)("every dialog of the role %s opens without a finding, with a command that gpuctl has", async (role) => {
  await openBrowser();
  server.mock.role = role;
  const found: string[] = [];
  const shown = new Set<string>();
  let opened = 0;
  for (const [name, address] of Object.entries(role === "user" ? USER_PAGES : ADMIN_PAGES)) {
    await visit(address);
    (await linesOf(page.locator("main"))).forEach((line) => shown.add(line));
    const buttons = page.locator('main button[aria-haspopup="dialog"]');
    const labels = [...new Set(await buttons.allTextContents())];
    for (const label of labels) {
      await buttons.filter({ hasText: label }).first().click();
      await page.waitForSelector('[role="dialog"] .consequences');
      found.push(...(await inspect(`${name} ${label.replace(/\W+/g, "-")}`, "dialog")));
      const lines = await linesOf(page.locator('[role="dialog"]'));
      if (lines.length === 0) found.push(`${name} ${label}: it shows no command`);
      found.push(...lines.map(complaint).filter((line) => line !== null));
      lines.forEach((line) => shown.add(line));
      await tab?.closeDialog();
      opened += 1;
    }
  }
  expect(found.join("\n")).toBe("");
  expect(opened).toBeGreaterThan(10);
  // A test of gpuctl parses them.
  await expect(`${[...shown].join("\n")}\n`).toMatchFileSnapshot(`../gpuctl-lines/${role}.txt`);
});

it("a rental by the keyboard alone is one request", async () => {
  await openBrowser();
  server.mock.sent.length = 0;
  await visit("/");
  await tab?.goBy("c", "/catalog");
  await page.getByRole("link", { name: "Rent h100-8" }).focus();
  await page.keyboard.press("Enter");
  await tab?.arrived("/rent");
  await page.getByLabel("Name").focus();
  await page.keyboard.type("by-keyboard");
  await page.keyboard.press("Enter");
  await page.waitForURL("**/console/allocations/**");
  await page.waitForSelector("main .steps");
  expect(server.mock.sent.map(({ path, body }) => [path, (body as { name: string }).name])).toEqual([["/api/v1/allocations", "by-keyboard"]]);
  expect(complaints).toEqual([]);
});

it("a page whose file is of another release offers a reload and keeps what was typed", async () => {
  await openBrowser();
  await visit("/rent?sku=h100-8");
  await page.getByLabel("Name").fill("typed-before");
  server.missing.add("/money-");
  await page.getByRole("link", { name: "Money" }).click();
  await page.getByText("the service has another version of the console").waitFor();
  server.missing.clear();
  await page.getByRole("button", { name: "Reload" }).click();
  await page.waitForSelector("main h1");
  await visit("/rent?sku=h100-8");
  expect(await page.getByLabel("Name").inputValue()).toBe("typed-before");
});

it("names with markup run nothing", async () => {
  await openBrowser();
  const dialogs: string[] = [];
  page.on("dialog", (dialog) => {
    dialogs.push(dialog.message());
    void dialog.dismiss();
  });
  await visit("/allocations");
  await page.getByText("<img src=x onerror=alert(1)>").waitFor();
  expect(dialogs).toEqual([]);
  expect(asked.filter((url) => url.endsWith("/x"))).toEqual([]);
});
