// The form that registers a node.
import { describe, expect, it } from "vitest";
import { fireEvent, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { skuField } from "../src/pages/nodes.tsx";
import { me, sku } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

async function opened() {
  const { queries } = openConsole("/nodes");
  await screen.findByRole("group", { name: "Nodes" });
  await waitFor(() => expect(queries.isFetching()).toBe(0));
  await userEvent.click(screen.getByRole("button", { name: "Register…" }));
  return within(await screen.findByRole("dialog"));
}

describe("the form that registers a node", () => {
  it("offers the SKUs with their GPUs and regions, and sends the one that is chosen", async () => {
    mock.role = "admin";
    const dialog = await opened();
    const choice = dialog.getByRole<HTMLSelectElement>("combobox", { name: "SKU" });
    expect([...choice.options].map(({ text }) => text)).toEqual(["Choose…", "h100-8 · 8 × H100 · eu-west-1, eu-north-1"]);
    fireEvent.change(choice, { target: { value: "h100-8" } });
    for (const [name, value] of [["Host", "gpu-9.example.net"], ["Region", "eu-west-1"], ["GPUs", "8"], ["SSH user of the operators", "ops"], ["SSH public key of the operators", "ssh-ed25519 AAAA"]] as const) {
      fireEvent.change(dialog.getByRole("textbox", { name }), { target: { value } });
    }
    expect(dialog.getByRole("group", { name: "command" }).textContent).toContain("gpuctl nodes create gpu-9.example.net --port 22 --sku h100-8 --region eu-west-1");
    await userEvent.click(dialog.getByRole("button", { name: "Register" }));
    await waitFor(() => expect(mock.sent.map(({ path, body }) => [path, (body as { sku: string }).sku])).toEqual([["/api/v1/admin/nodes", "h100-8"]]));
  });

  it("takes the name of a SKU as text from a caller who may not see SKUs, and reads none", async () => {
    const asked: string[] = [];
    mock.overrides.push(({ url }) => {
      const { pathname } = new URL(url);
      asked.push(pathname);
      return pathname === "/api/v1/me" ? Response.json({ ...me("user"), permissions: ["manage_nodes"] }) : null;
    });
    const dialog = await opened();
    expect(dialog.getByRole("textbox", { name: "SKU" })).toBeTruthy();
    expect(asked).not.toContain("/api/v1/admin/skus");
  });

  it.each([
    ["are not read yet", undefined],
    ["are too many", { skus: [sku], isPartial: true }],
    ["do not exist", { skus: [], isPartial: false }],
  ])("takes it as text where SKUs %s", (_, known) => {
    expect(skuField(known).kind).toBeUndefined();
  });
});
