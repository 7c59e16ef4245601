// Pages in states that the usual answers of the mock have not: no finding of axe, no complaint of the browser, nothing wider than the window.
import { expect, it } from "vitest";
import type { Schemas } from "../../src/api/client.ts";
import { ago, allocation, allocations, balance, node, uuid } from "../fixtures.ts";
import { Tab, WIDE } from "./browser.ts";
import { browser, server } from "./console-in-browser.ts";

interface PageState {
  role: "user" | "admin";
  address: string;
  /** What is on the page once it is in this state. */
  shows: string;
  allocations?: Schemas["Allocation"][];
  node?: Schemas["Node"];
  balance?: Schemas["BillingAccount"];
}

const EMPTY = { ...balance, balance_minor: 0, balance_micro: 0, available_minor: 0, running: 0, burn_minor_per_hour: 0, lasts_until: null };
const REGISTERED: Partial<Schemas["Node"]> = { onboarding_mode: "maas", state: "bootstrap-issued", agent: null, inventory: null, hardware: [] };
const VALIDATION: Schemas["NodeValidation"] = { task_id: uuid(2002), level: "deep", ended_at: ago(10), passed: false, measurements: { gpu_memory_gib_per_s: 2100 }, shortfalls: ["2400 are needed"], not_tested: {} };

const STATES: Record<string, PageState> = {
  "first steps without money": { role: "user", address: "/", shows: "Top up your balance", allocations: [], balance: EMPTY },
  "first steps with an active allocation": { role: "user", address: "/", shows: "Open a terminal", allocations: [allocation(1)] },
  "a chart of the use of GPUs": { role: "user", address: `/allocations/${uuid(101)}`, shows: "the dashed line their memory", allocations: [allocation(1)] },
  "a clean-up that is proved": {
    role: "user", address: `/allocations/${uuid(101)}`, shows: "signed report",
    allocations: [allocation(1, { state: "released", ssh: null, released_at: ago(3), status_history: [{ state: "released", reason: "cleaned_up", at: ago(3) }] })],
  },
  "a deployment that has failed": {
    role: "admin", address: `/nodes/${uuid(50)}`, shows: "mark it as fixed",
    node: node(0, { ...REGISTERED, machine: { system_id: "4y3h7n", step: "failed", status: null, step_entered_at: ago(6) }, state_reason: { code: "deployment_failed", message: "MAAS could not deploy it." } }),
  },
  "a validation that was not passed": { role: "admin", address: `/nodes/${uuid(50)}`, shows: "2400 are needed", node: node(0, { validation: VALIDATION }) },
  "requests before one is looked up": { role: "admin", address: "/requests", shows: "Paste one" },
};

const LOOKS = [
  { media: { colorScheme: "light" }, viewport: WIDE, run: "axe.run()" },
  { media: { colorScheme: "dark" }, viewport: WIDE, run: 'axe.run({ runOnly: ["color-contrast"] })' },
  { media: { colorScheme: "light" }, viewport: { width: 320, height: 700 }, run: "axe.run()" },
] as const;

it.each(Object.entries(STATES))("%s: no finding in any look", async (_, { role, address, shows, node, ...state }) => {
  const { mock } = server;
  Object.assign(mock, { role, allocations: state.allocations ?? allocations, balance: state.balance ?? balance });
  let samples = 0;
  mock.overrides.splice(0, mock.overrides.length, ({ url }) => {
    const { pathname } = new URL(url);
    if (node && pathname === `/api/v1/admin/nodes/${node.id}`) return Response.json(node);
    if (!pathname.endsWith("/telemetry")) return null;
    samples += 1;
    const gpus = [{ index: 0, uuid: "GPU-0", utilization_percent: 40 + samples, memory_used_mib: 20, memory_total_mib: 80 }];
    return Response.json({ allocation_id: uuid(101), at: new Date(Date.now() + samples * 1000).toISOString(), gpus });
  });
  const tab = await Tab.open(browser, server);
  await tab.visit(address);
  if (samples > 0) await tab.page.getByRole("region", { name: "GPUs" }).getByRole("button", { name: "Read again" }).click();
  await tab.page.getByText(shows).first().waitFor();
  const found: string[] = [];
  for (const { media, viewport, run } of LOOKS) {
    await tab.page.emulateMedia(media);
    await tab.page.setViewportSize(viewport);
    const lines = await tab.findings(run);
    const wider = await tab.page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
    found.push(...lines, ...(wider > 0 ? [`it is ${wider} px wider than a window of ${viewport.width} px`] : []), ...tab.complaints.splice(0));
  }
  await tab.context.close();
  expect(found.join("\n")).toBe("");
});
