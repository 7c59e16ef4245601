// The clean-up of an allocation as its user reads it.
import { describe, expect, it } from "vitest";
import { screen } from "@testing-library/react";
import { cleanUpOf } from "../src/pages/allocation-clean-up.tsx";
import { ago, allocation, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

const ended = (reason: string) => ({ state: "released" as const, ssh: null, released_at: ago(3), status_history: [{ state: "requested", reason: "requested", at: ago(9) }, { state: "released", reason, at: ago(3) }] });

describe("the clean-up of an allocation", () => {
  it.each([
    ["proved", "is proved by the node", ended("cleaned_up"), /has proved by a signed report that nothing is left of it/],
    ["without proof", "was skipped by an administrator", ended("forced"), /released it without the node's proof/],
    ["", "was not needed, since it never ran", ended("cancelled"), /never ran on a node/],
    ["in progress", "is awaited, with its deadline", { state: "releasing" as const, deadline_at: new Date(Date.now() + 125_000).toISOString() }, /The proof is due in 2 minutes\./],
    ["failed", "has failed, with its reason", { state: "release_failed" as const, state_reason: "tenant_remains: a process" }, /not proved that nothing is left of it: tenant remains: a process\./],
  ])("%s: it %s", async (state, _, change, text) => {
    mock.allocations = [allocation(1, change)];
    openConsole(`/allocations/${uuid(101)}`);
    const card = await screen.findByRole("region", { name: "Clean-up" });
    expect(card.textContent).toMatch(text);
    expect(card.querySelector(".state")?.textContent ?? "").toBe(state);
  });

  it.each(["requested", "provisioning", "active"] as const)("is not spoken of while it is %s", async (state) => {
    expect(cleanUpOf(allocation(1, { state }))).toBe("not-begun");
  });

  it("of an allocation whose history is empty is not called proved", () => {
    expect(cleanUpOf({ state: "released", status_history: [] })).toBe("not-needed");
  });
});
