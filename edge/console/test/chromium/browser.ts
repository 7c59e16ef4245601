// A real Chromium over the mocked control plane, and what a page in it may not do.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium, type Browser, type BrowserContext, type Locator, type Page } from "playwright-core";
import type { AxeResults } from "axe-core";
import { EXECUTABLE } from "./console-pages.ts";
import type { ConsoleServer } from "./server.ts";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
export const WIDE = { width: 1280, height: 900 };

export const launch = (): Promise<Browser> => chromium.launch({ executablePath: EXECUTABLE, args: ["--no-sandbox", "--disable-quic"], timeout: 180_000 });

/** A window with one tab, and what it complained of. */
export class Tab {
  readonly complaints: string[] = [];
  readonly asked: string[] = [];

  private constructor(readonly context: BrowserContext, readonly page: Page, readonly server: ConsoleServer) {
    page.setDefaultTimeout(Number(process.env["CONSOLE_TEST_WAIT_MS"] ?? 60_000));
    page.on("pageerror", (error) => this.complaints.push(`error: ${error.message}`));
    page.on("console", (message) => ["error", "warning"].includes(message.type()) && this.complaints.push(message.text()));
    page.on("response", (answer) => answer.status() >= 500 && this.complaints.push(`${answer.status()}: ${answer.url()}`));
    page.on("request", (request) => this.asked.push(request.url()));
  }

  static async open(browser: Browser, server: ConsoleServer): Promise<Tab> {
    const context = await browser.newContext({ viewport: WIDE, reducedMotion: "reduce", locale: "en-GB", timezoneId: "Europe/Berlin" });
    return new Tab(context, await context.newPage(), server);
  }

  async visit(address: string): Promise<void> {
    await this.page.goto(`${this.server.origin}/console${address}`);
    await this.ready();
  }

  /** Until the page has its heading and its data. */
  async ready(): Promise<void> {
    await this.page.waitForSelector("main h1");
    await this.page.waitForFunction(() => !document.querySelector(".loading"));
  }

  /** Until a page whose address begins so is there, and has taken the focus: a key that is pressed before is not for its fields. Whether it takes the focus is for the tests of pages. */
  async arrived(address: string, within: { timeout?: number } = {}): Promise<void> {
    await this.page.waitForURL(({ pathname }) => pathname.startsWith(`/console${address}`), within);
    await this.page.waitForFunction(() => /^(?:H1|MAIN)$/.test(document.activeElement?.tagName ?? ""), null, { timeout: 15_000 }).catch(() => {});
  }

  /** Goes to a page by `g` and its letter. Between the two a machine may pause for longer than the console waits for the letter. */
  async goBy(letter: string, address: string): Promise<void> {
    for (let tries = 1; ; tries += 1) {
      await this.page.keyboard.press("g");
      await this.page.keyboard.press(letter);
      try {
        return await this.arrived(address, { timeout: 20_000 });
      } catch (error) {
        if (tries === 3) throw error;
      }
    }
  }

  /** Presses Tab until the element has the focus, as a person without a pointer does. */
  async tabTo(target: Locator): Promise<void> {
    await target.first().waitFor();
    for (let presses = 0; presses < 150; presses += 1) {
      if (await target.first().evaluate((element) => element === document.activeElement)) return;
      await this.page.keyboard.press("Tab");
    }
    throw new Error(`the keyboard does not reach ${String(target)}`);
  }

  /** Closes the open dialog as the keyboard does. */
  async closeDialog(): Promise<void> {
    await this.page.keyboard.press("Escape");
    await this.page.waitForSelector('[role="dialog"]', { state: "detached" }).catch(async () => {
      const focused = await this.page.evaluate(() => document.activeElement?.outerHTML.slice(0, 200));
      throw new Error(`Escape does not close the dialog; the focus is on ${focused ?? "nothing"}`);
    });
  }

  /** What axe finds, a line for each element. */
  async findings(run = "axe.run()"): Promise<string[]> {
    // As a protocol command, which the page's own policy does not concern.
    await this.page.evaluate(AXE);
    const results = (await this.page.evaluate(run)) as AxeResults;
    return results.violations.flatMap((violation) => violation.nodes.map(({ html, failureSummary }) => `${violation.id}: ${html}: ${failureSummary ?? ""}`));
  }
}
