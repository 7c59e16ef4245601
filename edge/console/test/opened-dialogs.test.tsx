// A dialog that is open while the page behind it changes.
import { beforeEach, describe, expect, it, vi } from "vitest";
import { act, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import type { Schemas } from "../src/api/client.ts";
import { eventStream } from "../src/live/browser.ts";
import { answers } from "./answers.ts";
import { endpoint, entity, node, nodes, tree, uuid } from "./fixtures.ts";
import { refusal } from "./mock-api.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

beforeEach(() => {
  mock.role = "admin";
  // With a stream, nothing is read by itself within a minute.
  vi.spyOn(eventStream, "current").mockReturnValue("live");
});

const NOTICE = /does not offer this any more/;

/** Opens the dialog of this button. */
async function dialogOf(button: string) {
  await userEvent.click(await screen.findByRole("button", { name: button }));
  return within(await screen.findByRole("dialog"));
}

/** The dialog that is in the document: an element that was taken out of it can still be looked into. */
const opened = () => within(screen.getByRole("dialog"));

describe("a form that is open", () => {
  it("stays with what was typed where the cause of its row is another one meanwhile, and is sent", async () => {
    let waits_for = "clean-up (attempt 2)";
    answers("/api/v1/admin/runtime/tree", (query) => Response.json(tree(query.has("parked") ? [] : [{ ...entity, waits_for }])));
    const { queries } = openConsole("/stuck");
    const dialog = await dialogOf("Retry the release…");
    await userEvent.type(dialog.getByLabelText("Reason"), "the node");
    waits_for = "clean-up (attempt 3)";
    await act(() => queries.refetchQueries({ queryKey: ["tree"] }));
    await screen.findByText(/attempt 3/);
    expect(dialog.queryByText(NOTICE)).toBeNull();
    await userEvent.type(dialog.getByLabelText("Reason"), " is back{Enter}");
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    expect(mock.sent.map(({ body }) => body)).toEqual([{ reason: "the node is back" }]);
  });

  it("has what was typed again after Escape, and nothing after Cancel", async () => {
    openConsole("/stuck");
    await userEvent.type((await dialogOf("Retry the release…")).getByLabelText("Reason"), "the node is back");
    await userEvent.keyboard("{Escape}");
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    const dialog = await dialogOf("Retry the release…");
    expect(dialog.getByLabelText<HTMLInputElement>("Reason").value).toBe("the node is back");
    await userEvent.click(dialog.getByRole("button", { name: "Cancel" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    expect((await dialogOf("Retry the release…")).getByLabelText<HTMLInputElement>("Reason").value).toBe("");
  });

  it("leaves the focus on the page's heading where its button is gone once it is sent", async () => {
    let stuck = [entity];
    answers("/api/v1/admin/runtime/tree", (query) => Response.json(tree(query.has("parked") ? [] : stuck)));
    const { queries } = openConsole("/stuck");
    const dialog = await dialogOf("Retry the release…");
    await userEvent.type(dialog.getByLabelText("Reason"), "the node is back");
    stuck = [];
    await userEvent.click(dialog.getByRole("button", { name: "Retry the release" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    await screen.findByText("Nothing is stuck.");
    await waitFor(() => expect(document.activeElement?.textContent).toBe("Stuck"));
    // And where it goes a while after the dialog.
    stuck = [entity];
    await act(() => queries.refetchQueries({ queryKey: ["tree"] }));
    const button = await screen.findByRole("button", { name: "Retry the release…" });
    act(() => button.focus());
    stuck = [];
    await act(() => queries.refetchQueries({ queryKey: ["tree"] }));
    await waitFor(() => expect(document.activeElement?.textContent).toBe("Stuck"));
  });

  it("stays with what was typed where its row is gone, says so, and shows why it is refused", async () => {
    let stuck = [entity];
    answers("/api/v1/admin/runtime/tree", (query) => Response.json(tree(query.has("parked") ? [] : stuck)));
    mock.overrides.push(({ method }) => (method === "POST" ? refusal(409, "state_conflict", "It is released already.") : null));
    const { queries } = openConsole("/stuck");
    const dialog = await dialogOf("Retry the release…");
    await userEvent.type(dialog.getByLabelText("Reason"), "the node is back");
    stuck = [];
    await act(() => queries.refetchQueries({ queryKey: ["tree"] }));
    await dialog.findByText(NOTICE);
    expect(opened().getByLabelText<HTMLInputElement>("Reason").value).toBe("the node is back");
    await userEvent.click(dialog.getByRole("button", { name: "Retry the release" }));
    await dialog.findByText("It is released already.");
  });

  it("stays with what was typed where the state of its node has become another one", async () => {
    let state: Schemas["NodeState"] = "active";
    answers(`/api/v1/admin/nodes/${uuid(51)}`, () => Response.json(node(1, { state })));
    const { queries } = openConsole(`/nodes/${uuid(51)}`);
    const dialog = await dialogOf("Quarantine…");
    await userEvent.type(dialog.getByLabelText("Reason"), "noisy");
    state = "offline";
    await act(() => queries.refetchQueries({ queryKey: ["node"] }));
    await waitFor(() => expect(document.querySelector(".why .state")?.textContent).toBe("offline"));
    expect(opened().getByLabelText<HTMLInputElement>("Reason").value).toBe("noisy");
    expect(opened().queryByText(NOTICE)).toBeNull();
    await userEvent.click(opened().getByRole("button", { name: "Cancel" }));
    expect(screen.queryByRole("dialog")).toBeNull();
  });

  it("is of the opposite of what another tab has done no less: the form does not turn into it", async () => {
    let state: Schemas["NotificationEndpoint"]["state"] = "active";
    answers("/api/v1/notification-endpoints", () => Response.json({ items: [{ ...endpoint, state }], next_page: null }));
    const { queries } = openConsole("/notifications");
    const dialog = await dialogOf("Disable…");
    state = "disabled";
    await act(() => queries.refetchQueries({ queryKey: ["endpoints"] }));
    await dialog.findByText(NOTICE);
    await userEvent.click(dialog.getByRole("button", { name: "Disable" }));
    await waitFor(() => expect(mock.sent.map(({ body }) => body)).toEqual([{ enabled: false }]));
  });

  it("is left with its page by the browser's Back", async () => {
    const { router } = openConsole("/nodes");
    await screen.findByRole("heading", { level: 1, name: "Nodes" });
    await act(() => router.navigate({ to: "/nodes/$id", params: { id: uuid(51) } }));
    await dialogOf("Quarantine…");
    act(() => router.history.back());
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  });
});

describe("what is shown once", () => {
  it("stays where the machine has enrolled meanwhile", async () => {
    let machine = nodes[2] ?? node(2);
    answers(`/api/v1/admin/nodes/${machine.id}`, () => Response.json(machine));
    mock.overrides.push(({ url, method }) =>
      method === "POST" && url.endsWith("/bootstrap-script") ? Response.json({ command: "ssh once-4711", script: "#!/bin/sh", expires_at: new Date().toISOString() }, { status: 201 }) : null,
    );
    const { queries } = openConsole(`/nodes/${machine.id}`);
    const dialog = await dialogOf("Set-up command…");
    await userEvent.click(dialog.getByRole("button", { name: "Set-up command" }));
    await dialog.findByText("ssh once-4711");
    machine = { ...node(1), id: machine.id };
    await act(() => queries.refetchQueries({ queryKey: ["node"] }));
    await waitFor(() => expect(screen.queryByRole("button", { name: "Set-up command…", hidden: true })).toBeNull());
    expect(opened().getByText("ssh once-4711")).toBeTruthy();
    await userEvent.click(opened().getByRole("button", { name: "Close" }));
    expect(document.body.textContent).not.toContain("once-4711");
  });
});
