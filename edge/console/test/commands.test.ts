// Command lines that the console makes are gpuctl's, with options that it has. Those of all dialogs are checked in Chromium.
import { expect, it } from "vitest";
import { node } from "./fixtures.ts";
import { complaint } from "./gpuctl.ts";
import { actionsOf, isGone, isToReissue } from "../src/pages/node-actions.ts";
import { withdraw } from "../src/pages/skus.tsx";
import { paymentReviewActions } from "../src/pages/payment-review-actions.ts";
import { rolloutActions } from "../src/pages/rollout-actions.ts";
import { rentCommand } from "../src/pages/rent.tsx";
import { end } from "../src/pages/all-sessions.tsx";
import { takeBack } from "../src/pages/policies.tsx";

const shown = new Set<string>();

/** Why lines are none of gpuctl's. A test of gpuctl parses them. */
function complaints(lines: string[]): (string | null)[] {
  lines.forEach((line) => shown.add(line));
  return lines.map(complaint).filter(Boolean);
}

it("that of a rental with everything chosen is gpuctl's", () => {
  expect(complaints([rentCommand({ sku: "h100-8", gpus: "2", region: "eu", key: "k", queue: "5", name: "my run", labels: "a=b, c" })])).toEqual([]);
});

it("those of every action on a node are gpuctl's", () => {
  const states = ["active", "quarantined", "retired", "registered"] as const;
  const values = { reason: "r", drain: "yes", level: "quick", type: "node.reboot" };
  const lines = states.flatMap((state) => actionsOf(node(1, { state, onboarding_mode: "maas", inventory: null })).map((action) => action.command?.(values) ?? ""));
  expect(lines.length).toBeGreaterThan(12);
  expect(complaints(lines)).toEqual([]);
});

it("what a node's state refuses is not offered", () => {
  const offered = (change: Parameters<typeof node>[1]) => actionsOf(node(1, { onboarding_mode: "maas", ...change })).map(({ id }) => id.split(":")[0]);
  expect(offered({ state: "draining" })).not.toContain("reactivate");
  expect(offered({ state: "retired" })).toContain("reactivate");
  // The fixture has an allocation on the node.
  for (const way of ["validate", "reimage"]) {
    expect(offered({ state: "active" })).not.toContain(way);
    expect(offered({ state: "active", inventory: null })).toContain(way);
  }
  expect(offered({ state: "quarantined", agent: null })).not.toContain("run");
  const machine = { state: "releasing" } as never;
  expect(offered({ state: "removing", overdue: true, machine })).toEqual(["remove"]);
  expect(offered({ state: "removing", overdue: false, machine })).toEqual([]);
  const states = ["active", "retired", "draining", "removing", "removed"] as const;
  expect(states.filter((state) => isToReissue(node(1, { state })))).toEqual(["active", "retired"]);
  expect(states.filter((state) => isGone(node(1, { state })))).toEqual(["removing", "removed"]);
});

it("that of an approval that is withdrawn is gpuctl's, and asks for the status that the SKU has", () => {
  const lines = (["draft", "active", "deprecated", "inactive"] as const).map((status) => withdraw({ id: "s", name: "h100-8", status }).command({ reason: "r" }));
  expect(lines).toEqual(["deprecate", "activate", "deprecate", "deactivate"].map((way) => `gpuctl skus ${way} h100-8 --reason r`));
  expect(complaints(lines)).toEqual([]);
});

it("those that end the review of a payment are gpuctl's, name what is reviewed, and are offered where something is", () => {
  const lines = paymentReviewActions({ id: "p", review: "pi_1:4200:GBP" }).map((action) => action.command?.({ review: "pi_1:4200:GBP", reason: "r" }) ?? "");
  expect(lines).toEqual(["gpuctl billing settle-review p --review pi_1:4200:GBP --reason r", "gpuctl billing dismiss-review p --review pi_1:4200:GBP --reason r"]);
  expect(complaints(lines)).toEqual([]);
  expect(paymentReviewActions({ id: "p", review: null })).toEqual([]);
});

it("those of every step of a rollout are gpuctl's", () => {
  const lines = (["running", "paused", "stopped"] as const).flatMap((state) => rolloutActions({ id: "r", state }).map((action) => action.command?.({ reason: "r" }) ?? ""));
  expect(lines.length).toBeGreaterThan(5);
  expect(complaints(lines)).toEqual([]);
  expect(rolloutActions({ id: "r", state: "completed" })).toEqual([]);
});

it("those of an administrator who ends a login, and takes values of a policy back, are gpuctl's", () => {
  const value = { id: "v", key: "allocation.max_concurrent_per_user", value: 20, scope: { plan: "trial" }, reason: "r", written_by: "w", written_at: "2026-01-01T00:00:00Z" };
  const line = (effective_at: string) => takeBack({ ...value, effective_at }).command({ reason: "r" });
  const ended = end({ id: "s", user_id: "ann", is_current: false }).command({ reason: "theft" });
  expect(ended).toBe("gpuctl sessions kill s --reason theft");
  expect(line("2026-01-01T00:00:00Z")).toBe("gpuctl policy unset allocation.max_concurrent_per_user --plan trial --reason r --old-value 20");
  expect(line("2100-01-01T00:00:00Z")).toContain(" --effective-at 2100-01-01T00:00:00Z ");
  expect(complaints([ended, line("2026-01-01T00:00:00Z"), line("2100-01-01T00:00:00Z")])).toEqual([]);
});

it("all of them are in the list that gpuctl's own test parses", async () => {
  expect(shown.size).toBeGreaterThan(15);
  await expect(`${[...shown].join("\n")}\n`).toMatchFileSnapshot("gpuctl-lines/states.txt");
});

it("those that gpuctl has not are found", () => {
  expect(complaint("gpuctl allocations explode x")).toContain("no such command");
  expect(complaint("gpuctl allocations release x --force")).toContain("--force");
});
