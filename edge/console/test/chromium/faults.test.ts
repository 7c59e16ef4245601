// Faults that a mocked control plane makes, in a real Chromium: nothing is sent twice, nothing typed is lost, and the reason is shown.
import { beforeEach, expect, it } from "vitest";
import { allocation } from "../fixtures.ts";
import { refusal } from "../mock-api.ts";
import { Tab } from "./browser.ts";
import { browser, server } from "./console-in-browser.ts";

let tab: Tab;
beforeEach(async () => {
  await tab?.context.close();
  tab = await Tab.open(browser, server);
  Object.assign(server.mock, { role: "user", hasSession: true });
  server.mock.overrides.length = 0;
  server.mock.sent.length = 0;
  server.cut.clear();
});

const sent = (path: string) => server.mock.sent.filter((request) => request.path === path);
const rentals = () => sent("/api/v1/allocations");
const keys = () => rentals().map(({ key }) => key);

/** The form of a rental, with a name in it. */
async function typeRental(): Promise<void> {
  await tab.visit("/rent?sku=h100-8");
  await tab.page.getByLabel("Name").fill("typed");
}
const rent = () => tab.page.getByRole("button", { name: "Rent", exact: true });
const again = () => tab.page.getByRole("button", { name: "Send again" });
const typed = () => tab.page.getByLabel("Name").inputValue();
const rented = async () => {
  await tab.page.waitForURL("**/console/allocations/**");
  await tab.page.waitForSelector("main .steps");
};

/** The next request of this method and path is answered so; later ones as usual. */
function once(method: string, path: string, answer: () => Response | Promise<Response>): void {
  let used = false;
  server.mock.overrides.push((request) => {
    if (used || request.method !== method || new URL(request.url).pathname !== path) return null;
    used = true;
    return answer();
  });
}

it("a double click is one request, and the way back sends nothing", async () => {
  await typeRental();
  await rent().dblclick();
  await rented();
  await tab.page.goBack();
  await tab.ready();
  expect(await typed()).toBe("");
  await tab.page.goForward();
  await tab.page.waitForSelector("main .steps");
  expect(rentals()).toHaveLength(1);
});

it("a tab that is reloaded before its answer sends the same request again", async () => {
  await typeRental();
  let arrived: () => void = () => {};
  const arrival = new Promise<void>((done) => (arrived = done));
  once("POST", "/api/v1/allocations", () => {
    arrived();
    return new Promise<Response>(() => {});
  });
  await rent().click();
  await arrival;
  await tab.page.reload();
  await tab.ready();
  expect(await typed()).toBe("typed");
  await rent().click();
  await rented();
  expect(keys()).toHaveLength(2);
  expect(new Set(keys()).size).toBe(1);
  // It is answered: the next rental is another one.
  await typeRental();
  await rent().click();
  await rented();
  expect(new Set(keys()).size).toBe(2);
});

it("a device that is offline says so, and sends what was typed when it is back", async () => {
  await typeRental();
  await tab.context.setOffline(true);
  await tab.page.getByText("This device is offline. What you see was read before.").waitFor();
  await rent().click();
  await tab.page.getByText(/What you sent may have arrived/).waitFor();
  expect(await typed()).toBe("typed");
  await tab.context.setOffline(false);
  await tab.page.getByText("What you see was read before").waitFor({ state: "detached" });
  await again().click();
  await rented();
  expect(rentals()).toHaveLength(1);
});

it("an answer that breaks off is asked for again under the same key", async () => {
  await typeRental();
  server.cut.add("/api/v1/allocations");
  await rent().click();
  await tab.page.getByText(/No answer arrived\. What you sent may have arrived/).waitFor();
  expect(await typed()).toBe("typed");
  server.cut.clear();
  await again().click();
  await rented();
  expect(new Set(keys()).size).toBe(1);
});

it.each([
  [403, "forbidden", "The role user is needed."],
  [404, "not_found", "There is no such SKU."],
  [409, "insufficient_capacity", "No node has that many free GPUs."],
  [422, "invalid_request", "`name` is taken."],
] as const)("a refusal with %i is shown with its correlation id, and leaves what was typed", async (status, code, message) => {
  await typeRental();
  once("POST", "/api/v1/allocations", () => refusal(status, code, message));
  await rent().click();
  await tab.page.getByText(message).waitFor();
  await tab.page.getByText("0199e3f4-cafe").waitFor();
  expect(await typed()).toBe("typed");
  await tab.page.getByLabel("Name").fill("typed-2");
  await rent().click();
  await rented();
  expect(new Set(keys()).size).toBe(2);
});

it.each([
  [429, "rate_limited", { "Retry-After": "7" }],
  [500, "internal_error", {}],
  [503, "service_unavailable", { "Retry-After": "7" }],
] as const)("an outage with %i is shown, and the same request is sent again by its button", async (status, code, headers) => {
  await typeRental();
  once("POST", "/api/v1/allocations", () => refusal(status, code, "Not at the moment.", headers));
  await rent().click();
  await tab.page.getByText("Not at the moment.").waitFor();
  if ("Retry-After" in headers) await tab.page.getByText("The service asks to wait 7 s.").waitFor();
  await again().click();
  await rented();
  expect(new Set(keys()).size).toBe(1);
});

it.each([429, 503])("a list that is refused with %i says why, and is read again after the time that was asked for", async (status) => {
  once("GET", "/api/v1/ssh-keys", () => refusal(status, "busy", "Not at the moment.", { "Retry-After": "4" }));
  await tab.page.goto(`${server.origin}/console/ssh-keys`);
  // Both in one look: they are gone when the list is read again.
  const reasons = ["Not at the moment.", "The service asks to wait 4 s."];
  await tab.page.waitForFunction((texts) => texts.every((text) => document.body.innerText.includes(text)), reasons);
  await tab.page.getByText("laptop").waitFor();
  expect(await tab.page.getByText("Not at the moment.").count()).toBe(0);
});

it("a dialog whose session has ended has the login in it, stays as it was, and is sent once", async () => {
  await tab.visit("/service-accounts");
  await tab.page.getByRole("button", { name: "Create…" }).click();
  const dialog = tab.page.getByRole("dialog");
  await dialog.getByLabel("Name").fill("typed");
  server.mock.hasSession = false;
  await dialog.getByRole("button", { name: "Create" }).click();
  const window = tab.page.waitForEvent("popup");
  await dialog.getByRole("button", { name: "Log in", exact: true }).click();
  expect(new URL((await window).url()).searchParams.get("return_to")).toBe("/console/logged-in");
  expect(await dialog.getByLabel("Name").inputValue()).toBe("typed");
  server.mock.hasSession = true;
  await dialog.getByRole("button", { name: "I have logged in" }).click();
  await dialog.waitFor({ state: "detached" });
  const posts = sent("/api/v1/service-accounts");
  expect(posts).toHaveLength(2);
  expect(new Set(posts.map(({ key }) => key)).size).toBe(1);
});

it("a form waits for a slow answer, and is not sent again meanwhile", async () => {
  await typeRental();
  let release: () => void = () => {};
  const gate = new Promise<void>((done) => (release = done));
  once("POST", "/api/v1/allocations", () => gate.then(() => Response.json(allocation(1), { status: 201 })));
  await rent().click();
  const sending = tab.page.getByRole("button", { name: "Sending…" });
  await sending.waitFor();
  expect(await sending.isDisabled()).toBe(true);
  await tab.page.getByLabel("Name").press("Enter");
  release();
  await rented();
  expect(rentals()).toHaveLength(1);
});

it.each([1, -1])("a device whose clock is off by %i hours shows ages by the service's clock", async (hours) => {
  await tab.context.addInitScript((ahead: number) => {
    const Real = Date;
    globalThis.Date = class extends Real {
      constructor(...parts: [] | [number | string | Date]) {
        super(...((parts.length === 0 ? [Real.now() + ahead] : parts) as [number]));
      }
      static override now = () => Real.now() + ahead;
    } as DateConstructor;
  }, hours * 3_600_000);
  await tab.visit("/sessions");
  const seen = tab.page.locator("tbody tr").first().locator("td").nth(3);
  await expect.poll(() => seen.textContent(), { timeout: 60_000 }).toMatch(/^[1-9] minutes? ago$/);
  await tab.page.getByText("As of now").waitFor();
  expect(await tab.page.locator("[data-old]").count()).toBe(0);
});

it("a role that was taken back is effective at the next answer", async () => {
  server.mock.role = "admin";
  await tab.visit("/nodes");
  server.mock.role = "user";
  server.mock.overrides.push((request) => (new URL(request.url).pathname.startsWith("/api/v1/admin/") ? refusal(403, "forbidden", "The role admin is needed.") : null));
  // The page may have read again by itself, and the button be gone: a click that waits for it would wait forever.
  await tab.page.evaluate(() => document.querySelector<HTMLElement>("[aria-label='Read again']")?.click());
  await tab.page.getByText("This page needs the role admin.").waitFor();
  expect(await tab.page.getByRole("link", { name: "Nodes" }).count()).toBe(0);
  expect(await tab.page.getByRole("button", { name: "Register…" }).count()).toBe(0);
});

it("two administrators on one policy: the later one sees both values and decides", async () => {
  server.mock.role = "admin";
  await tab.visit("/policies?key=allocation.max_concurrent_per_user");
  await tab.page.getByRole("button", { name: "Set a value…" }).click();
  const dialog = tab.page.getByRole("dialog");
  await dialog.getByLabel("Value").fill("30");
  await dialog.getByLabel("Reason").fill("more room");
  once("POST", "/api/v1/admin/policy-values", () =>
    Response.json({ code: "state_conflict", message: "`old_value` is not what it would be.", correlation_id: "c", details: { current_value: 25 } }, { status: 409 }),
  );
  await dialog.getByRole("button", { name: "Set a value" }).click();
  await dialog.getByText("The value is 25, and it was not set when you opened this form. You want 30.").waitFor();
  expect(await dialog.getByLabel("Reason").inputValue()).toBe("more room");
  await dialog.getByRole("button", { name: "Continue from 25" }).click();
  await dialog.getByRole("button", { name: "Set a value" }).click();
  await dialog.waitFor({ state: "detached" });
  const writes = sent("/api/v1/admin/policy-values").map(({ body }) => (body as { old_value: unknown }).old_value);
  expect(writes).toEqual([null, 25]);
});

it("a secret that is shown once is in no address, history, storage or later page", async () => {
  const secret = "shown-once-3f9a";
  await tab.visit("/service-accounts");
  await tab.page.getByRole("button", { name: "New key…" }).click();
  await tab.page.getByRole("dialog").getByRole("button", { name: "New key" }).click();
  await tab.page.getByText(secret).waitFor();
  const stored = () =>
    tab.page.evaluate(async () => {
      const databases = (await indexedDB.databases()).map(({ name }) => name);
      return JSON.stringify([document.cookie, { ...localStorage }, { ...sessionStorage }, history.state, databases, await caches.keys(), window.name]);
    });
  expect(await stored()).not.toContain(secret);
  await tab.page.getByRole("button", { name: "Close" }).click();
  await tab.page.getByRole("dialog").waitFor({ state: "detached" });
  const isGone = async () => !(await tab.page.content()).includes(secret) && !(await stored()).includes(secret);
  await expect.poll(isGone, { timeout: 60_000 }).toBe(true);
  await tab.visit("/money");
  await tab.page.goBack();
  await tab.ready();
  expect(await isGone()).toBe(true);
  await tab.page.reload();
  await tab.ready();
  expect(await isGone()).toBe(true);
  expect(tab.asked.filter((url) => url.includes(secret))).toEqual([]);
});

it("no script of the page has a token, and none is evaluated from text", async () => {
  await tab.visit("/");
  const outcome = await tab.page.evaluate(() => {
    const tried = (run: () => unknown) => {
      try {
        run();
        return "ran";
      } catch {
        return "refused";
      }
    };
    // The protocol's own scripts are not bound by the policy; one that the page would add is.
    const added = document.createElement("script");
    return [tried(() => (added.text = "window.ran = true")), tried(() => (document.createElement("p").innerHTML = "<b>x</b>"))];
  });
  expect(outcome).toEqual(["refused", "refused"]);
});
