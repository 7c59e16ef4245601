// The onboarding of a machine that MAAS deploys: what it waits for, and what to do where it has failed.
import { describe, expect, it } from "vitest";
import { screen, within } from "@testing-library/react";
import type { Schemas } from "../src/api/client.ts";
import { isSetUpByHand, onboardingSteps } from "../src/pages/node-onboarding.tsx";
import { ago, node, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

const REGISTERED = { onboarding_mode: "maas", state: "registered", agent: null, inventory: null, hardware: [] } as const satisfies Partial<Schemas["Node"]>;

const machine = (step: string, status: string | null = null): Schemas["NodeMachine"] => ({ system_id: "4y3h7n", step, step_entered_at: ago(6), status });

async function stepsOf(change: Partial<Schemas["Node"]>) {
  mock.role = "admin";
  const found = node(2, { ...REGISTERED, ...change });
  mock.overrides.push(({ url }) => (new URL(url).pathname === `/api/v1/admin/nodes/${found.id}` ? Response.json(found) : null));
  openConsole(`/nodes/${uuid(52)}`);
  const items = within(await screen.findByRole("list", { name: "Onboarding" })).getAllByRole("listitem");
  return { items, current: items.find((item) => item.getAttribute("aria-current") === "step")?.textContent ?? "" };
}

describe("a machine that MAAS deploys", () => {
  it("needs no command before MAAS has begun, and none while it is deployed", async () => {
    const { current } = await stepsOf({ machine: null });
    expect(current).toContain("Nothing is to be run on it");
    expect(screen.queryByRole("button", { name: "Set-up command…" })).toBeNull();
  });

  it("has the status of MAAS as it is", async () => {
    const { current } = await stepsOf({ state: "bootstrap-issued", machine: machine("deploying", "Deploying: configuring <storage>") });
    expect(current).toMatch(/MAAS installs the machine.*In progress since 6 minutes ago; MAAS says: Deploying: configuring <storage>/);
    expect(screen.queryByRole("button", { name: "Set-up command…" })).toBeNull();
  });

  it("that has failed says why, and what to do next", async () => {
    const { current } = await stepsOf({ state: "bootstrap-issued", machine: machine("failed"), state_reason: { code: "deployment_failed", message: "MAAS could not deploy it." } });
    expect(current).toMatch(/The deployment has failed: MAAS could not deploy it\..*mark it as fixed.*Reimage/);
  });

  it("that is deployed waits for its agent, and can be set up by hand where that does not come", async () => {
    const { items, current } = await stepsOf({ state: "bootstrap-issued", machine: machine("deployed") });
    expect(items[1]?.getAttribute("data-done")).toBe("true");
    expect(current).toContain("cloud-init status --wait");
    expect(screen.getByRole("button", { name: "Set-up command…" })).toBeTruthy();
  });

  it.each([
    ["before MAAS has begun", {}, "x----"],
    ["while it is deployed", { state: "bootstrap-issued" as const, machine: machine("deploying") }, "x----"],
    ["once it is deployed", { state: "bootstrap-issued" as const, machine: machine("deployed") }, "xx---"],
    ["once its agent has enrolled, whatever MAAS says", { state: "enrolling" as const, machine: machine("deploying"), agent: node(0).agent ?? null }, "xxx--"],
  ])("has its steps ticked off: %s", (_, change, steps) => {
    expect(onboardingSteps(node(2, { ...REGISTERED, ...change })).map(({ isDone }) => (isDone ? "x" : "-")).join("")).toBe(steps);
  });

  it("is told from one that a person sets up", () => {
    expect(isSetUpByHand({ onboarding_mode: "manual", machine: null })).toBe(true);
    expect(isSetUpByHand({ onboarding_mode: "maas", machine: machine("deploying") })).toBe(false);
  });
});
