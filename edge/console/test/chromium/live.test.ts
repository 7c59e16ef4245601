// One connection for all tabs of a browser, in a real Chromium: its messages refresh what is on screen, and nothing else is asked.
import { beforeEach, expect, it } from "vitest";
import type { BrowserContext, Page } from "playwright-core";
import { allocation, balance, posting } from "../fixtures.ts";
import { browser, server } from "./console-in-browser.ts";

let context: BrowserContext;
beforeEach(async () => {
  await context?.close();
  await expect.poll(() => server.streams.size, { timeout: 60_000 }).toBe(0);
  server.streamsOpened = 0;
  server.mock.allocations = [allocation(1)];
  server.mock.role = "user";
  context = await browser.newContext();
});

/** This long without a request, a tab has read what it shows. */
const QUIET_MS = 2_000;

/** A tab with the page, once it has live updates and has read everything once more because of them; and the requests that it sends from then on. */
async function tab(address: string, liveView?: string, quietMs = QUIET_MS): Promise<{ page: Page; asked: string[] }> {
  const page = await context.newPage();
  page.setDefaultTimeout(60_000);
  const asked: string[] = [];
  let [pending, last] = [0, Date.now()];
  const ended = () => {
    pending -= 1;
    last = Date.now();
  };
  page.on("request", (request) => {
    pending += 1;
    last = Date.now();
    asked.push(new URL(request.url()).pathname);
  });
  page.on("requestfinished", ended);
  page.on("requestfailed", ended);
  await page.goto(`${server.origin}/console${address}`);
  await page.waitForSelector("main h1");
  const views = liveView ? page.getByRole("region", { name: liveView, exact: true }) : page;
  await views.getByText("· live").first().waitFor();
  await expect.poll(() => pending === 0 && Date.now() - last > quietMs, { timeout: 60_000 }).toBe(true);
  asked.length = 0;
  return { page, asked };
}

it("two tabs have one connection, and a change is on screen in both", async () => {
  const [first, second] = [await tab("/allocations"), await tab("/allocations")];
  expect(server.streamsOpened).toBe(1);
  server.mock.allocations = [allocation(1, { name: "renamed-by-another-client" })];
  server.notify("provisioning.released", { allocation_id: allocation(1).id, state: "released" });
  for (const { page } of [first, second]) {
    // The tab that is not in front reads when it is.
    await page.bringToFront();
    await page.getByText("renamed-by-another-client").waitFor();
  }
  expect(server.streamsOpened).toBe(1);
});

it("the connection passes on when its tab closes", async () => {
  const [first, second] = [await tab("/allocations"), await tab("/allocations")];
  await first.page.close();
  await expect.poll(() => server.streamsOpened, { timeout: 60_000 }).toBe(2);
  await expect.poll(() => server.streams.size, { timeout: 60_000 }).toBe(1);
  await second.page.getByText("· live").first().waitFor();
});

it("a message refreshes only what it concerns", async () => {
  // Changes of keys are reported to operators alone.
  server.mock.role = "admin";
  const { page, asked } = await tab("/ssh-keys");
  server.notify("provisioning.released", { allocation_id: allocation(1).id });
  server.notify("runtime.changed", { kinds: ["tenant"], entities: [] });
  await expect.poll(() => asked.filter((path) => path === "/api/v1/ssh-keys").length, { timeout: 60_000 }).toBe(1);
  expect(asked.filter((path) => path.startsWith("/api/v1/allocations"))).toEqual([]);
  await page.close();
});

it("the ledger and the month are read again when the balance is another one, and neither says that it is live", async () => {
  const { page, asked } = await tab("/money", "Payments");
  for (const label of ["Ledger", "Spending per day"]) expect(await page.getByRole("region", { name: label, exact: true }).locator(".age").textContent()).not.toContain("live");
  server.mock.postings = [{ ...posting(0), allocation_id: null, reason: "posted-a-moment-ago" }, ...server.mock.postings];
  server.mock.balance = { ...balance, balance_micro: 124_000_000_000, balance_minor: 124_000 };
  await page.locator(".page-head").getByRole("button", { name: "Read again" }).click();
  await page.getByText("posted-a-moment-ago").waitFor();
  await expect.poll(() => asked.filter((path) => path === "/api/v1/billing/statements").length, { timeout: 60_000 }).toBe(1);
  // The ledger's page, and the postings of the chart.
  await expect.poll(() => asked.filter((path) => path === "/api/v1/billing/ledger").length, { timeout: 60_000 }).toBe(2);
  server.mock.balance = balance;
});

it("an idle tab with a connection asks nothing", async () => {
  // A machine that pauses sends the last read later.
  const { page, asked } = await tab("/allocations", undefined, 5 * QUIET_MS);
  // More than an interval of a tab without a connection.
  await page.waitForTimeout(12_000);
  expect(asked).toEqual([]);
});

it("without the connection the page says so and asks again", async () => {
  const { page, asked } = await tab("/allocations");
  server.refuseStreams = true;
  try {
    server.streams.forEach((stream) => stream.destroy());
    await page.getByText("There are no live updates").waitFor();
    asked.length = 0;
    await expect.poll(() => asked.includes("/api/v1/allocations"), { timeout: 60_000 }).toBe(true);
  } finally {
    server.refuseStreams = false;
  }
  await page.getByText("· live").first().waitFor();
});
