// The nodes of /dev that tenants may open beside those of their GPUs (decision 0089), for the tenant and for administrators.
import { expect, it } from "vitest";
import { screen, within } from "@testing-library/react";
import { allocation, node, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

const DEVICES = ["/dev/fuse", "/dev/infiniband/uverbs0"];

const devicesIn = (place: HTMLElement) => within(within(place).getByRole("list", { name: "Devices" })).getAllByRole("listitem").map(({ textContent }) => textContent);

it("further devices of an active allocation are listed for its tenant", async () => {
  mock.allocations = [allocation(1, { further_devices: DEVICES })];
  openConsole(`/allocations/${uuid(101)}`);
  const card = await screen.findByRole("region", { name: "Further devices" });
  expect(devicesIn(card)).toEqual(DEVICES);
});

it("an active allocation without further devices says what its programs open", async () => {
  mock.allocations = [allocation(1, { further_devices: [] })];
  openConsole(`/allocations/${uuid(101)}`);
  const card = await screen.findByRole("region", { name: "Further devices" });
  expect(card.textContent).toContain("the nodes of its own GPUs");
  expect(within(card).queryByRole("list")).toBeNull();
});

it.each(["requested", "provisioning", "releasing", "released"] as const)("an allocation that is %s shows no further devices: no program of it runs", async (state) => {
  mock.allocations = [allocation(1, { state, further_devices: DEVICES })];
  openConsole(`/allocations/${uuid(101)}`);
  await screen.findByRole("region", { name: "Summary" });
  expect(screen.queryByRole("region", { name: "Further devices" })).toBeNull();
});

it.each([
  ["shows what its tenants may open", DEVICES, DEVICES.join("")],
  ["says where its tenants open nothing beside their GPUs", [], "none beside their GPUs"],
])("a node %s", async (_, tenant_devices, text) => {
  mock.role = "admin";
  const { inventory } = node(0);
  if (!inventory) throw new Error("the fixture has an inventory");
  mock.overrides.push(({ url }) => (new URL(url).pathname === `/api/v1/admin/nodes/${uuid(50)}` ? Response.json(node(0, { inventory: { ...inventory, tenant_devices: [...tenant_devices] } })) : null));
  openConsole(`/nodes/${uuid(50)}`);
  const summary = await screen.findByRole("region", { name: "Summary" });
  const term = within(summary).getByText("Tenants' devices");
  expect(term.nextElementSibling?.textContent).toBe(text);
});
