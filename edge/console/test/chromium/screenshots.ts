// The pictures of the console in the book: `npm run screenshots`, after `npm run build`.
import { mkdirSync, writeFileSync } from "node:fs";
import { afterAll, beforeAll, expect, it } from "vitest";
import { chromium, type Browser } from "playwright-core";
import { ADMIN_PAGES, EXECUTABLE, USER_PAGES } from "./console-pages.ts";
import { startConsole, type ConsoleServer } from "./server.ts";

const FOLDER = "../../deploy/docs/src/user/console";
const WANTED_BYTES = 28_000;
const MOST_BYTES = 40_000;
/** From the best to the smallest. */
const QUALITIES = [60, 40, 25, 12];
const MOST_BYTES_TOGETHER = 1_000_000;
const VIEWPORT = { width: 1100, height: 760 };

let server: ConsoleServer;
let browser: Browser;
beforeAll(async () => {
  server = await startConsole();
  browser = await chromium.launch({ executablePath: EXECUTABLE, args: ["--no-sandbox", "--disable-quic"] });
  mkdirSync(FOLDER, { recursive: true });
});
afterAll(async () => {
  await browser?.close();
  await server?.close();
});

it("each page is in the book, in a small file", async () => {
  const context = await browser.newContext({ viewport: VIEWPORT, reducedMotion: "reduce", locale: "en-GB", timezoneId: "Europe/Berlin", colorScheme: "light" });
  const page = await context.newPage();
  const devtools = await context.newCDPSession(page);
  let together = 0;
  for (const [role, pages] of [["user", USER_PAGES], ["admin", ADMIN_PAGES]] as const) {
    server.mock.role = role;
    for (const [name, address] of Object.entries(pages)) {
      await page.goto(`${server.origin}/console${address}`);
      await page.waitForSelector("main h1");
      await page.waitForFunction(() => !document.querySelector(".loading"));
      let picture = Buffer.alloc(0);
      for (const quality of QUALITIES) {
        const { data } = await devtools.send("Page.captureScreenshot", { format: "webp", quality });
        picture = Buffer.from(data, "base64");
        if (picture.length <= WANTED_BYTES) break;
      }
      expect(picture.length, name).toBeLessThanOrEqual(MOST_BYTES);
      together += picture.length;
      writeFileSync(`${FOLDER}/${name}.webp`, picture);
    }
  }
  expect(together).toBeLessThanOrEqual(MOST_BYTES_TOGETHER);
});
