// What happens under an open page of administrators and operators: members that fall silent, nodes that go, roles that are taken back, refusals.
import { beforeEach, describe, expect, it } from "vitest";
import { act, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { withheldOf } from "../src/pages/operations.tsx";
import { silentMembers } from "../src/pages/supervision-tree.tsx";
import { Refresher } from "../src/live/refresh.ts";
import { entity, node, tree, uuid } from "./fixtures.ts";
import { refusal, type Override } from "./mock-api.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";
import { tallWindow } from "./tall-window.ts";

const NODE = `/nodes/${uuid(51)}`;

/** What is answered at a path of the API from now on, until it is changed. */
function answers(path: string, method = "GET"): { now: (override: Override | null) => void } {
  let current: Override | null = null;
  mock.overrides.push((request) => (current && request.method === method && new URL(request.url).pathname === `/api/v1${path}` ? current(request) : null));
  return { now: (override) => (current = override) };
}

beforeEach(() => {
  mock.role = "admin";
});

describe("a member that dies while its tree is open", () => {
  const other = { ...entity, id: uuid(104), member: uuid(701), member_name: "replica-2" };
  const whole = () => {
    const found = tree([entity, other]);
    const [member] = found.members;
    return { ...found, members: member ? [member, { ...member, id: uuid(701), name: "replica-2" }] : [] };
  };

  it("takes what it owned out of the tree, says so, and comes back with the member", async () => {
    tallWindow();
    const tree = answers("/admin/runtime/tree");
    tree.now(() => Response.json(whole()));
    const { queries } = openConsole("/tree");
    const members = () => [...document.querySelectorAll("details > summary strong")].map(({ textContent }) => textContent);
    await waitFor(() => expect(members()).toEqual(["replica-1", "replica-2"]));
    tree.now(() => Response.json({ ...whole(), members: whole().members.slice(0, 1), entities: [entity], silent: [uuid(701)] }));
    await act(() => queries.refetchQueries({ queryKey: ["tree"] }));
    expect(await screen.findByText("1 member did not answer: what it owns is not shown.")).toBeTruthy();
    expect(members()).toEqual(["replica-1"]);
    expect(document.querySelectorAll(".virtual-row")).toHaveLength(1);
    tree.now(() => Response.json(whole()));
    await act(() => queries.refetchQueries({ queryKey: ["tree"] }));
    await waitFor(() => expect(document.querySelectorAll(".virtual-row")).toHaveLength(2));
    expect(screen.queryByText(/did not answer/)).toBeNull();
  });

  it("leaves the tree as it was where the one that is asked dies, and says that it is old", async () => {
    tallWindow();
    const tree = answers("/admin/runtime/tree");
    const { queries } = openConsole("/tree");
    await waitFor(() => expect(document.querySelectorAll(".virtual-row")).toHaveLength(1));
    tree.now(() => refusal(500, "internal_error", "The service failed."));
    await act(() => queries.refetchQueries({ queryKey: ["tree"] }));
    expect(await screen.findByText("The service failed.")).toBeTruthy();
    expect(screen.getByText(/^Not read since/)).toBeTruthy();
    expect(document.querySelectorAll(".virtual-row")).toHaveLength(1);
  });

  it("is one, or several", () => {
    expect(silentMembers(2)).toBe("2 members did not answer: what they own is not shown.");
  });
});

describe("a node that appears and vanishes", () => {
  it("is in the list by a message, and out of it by another", async () => {
    const nodes = answers("/admin/nodes");
    nodes.now(() => Response.json({ items: [node(1)], next_page: null }));
    const { queries } = openConsole("/nodes");
    const names = () => [...document.querySelectorAll("tbody .row-link")].map(({ textContent }) => textContent);
    await waitFor(() => expect(names()).toEqual(["rack-1"]));
    const stream = new Refresher(queries);
    const changed = () => act(() => stream.onEvent({ kind: "message", message: { id: "m", type: "runtime.changed", time: "", data: { kinds: ["node"], entities: [{ kind: "node", id: uuid(55) }] } } }));
    nodes.now(() => Response.json({ items: [node(1), node(5)], next_page: null }));
    changed();
    await waitFor(() => expect(names()).toEqual(["rack-1", "rack-5"]));
    nodes.now(() => Response.json({ items: [node(1)], next_page: null }));
    changed();
    await waitFor(() => expect(names()).toEqual(["rack-1"]));
  });

  it("with a form open leaves the form and what was typed, and its request is refused with the reason", async () => {
    const one = answers(`/admin${NODE}`);
    const { queries } = openConsole(NODE);
    await userEvent.click(await screen.findByRole("button", { name: "Quarantine…" }));
    const dialog = within(await screen.findByRole("dialog"));
    await userEvent.type(dialog.getByRole("textbox", { name: "Reason" }), "noisy");
    const gone = () => refusal(404, "not_found", "There is no such node.");
    one.now(gone);
    answers(`/admin${NODE}/quarantine`, "POST").now(gone);
    await act(() => queries.refetchQueries({ queryKey: ["node"] }));
    expect(dialog.getByRole<HTMLInputElement>("textbox", { name: "Reason" }).value).toBe("noisy");
    await userEvent.click(dialog.getByRole("button", { name: "Quarantine" }));
    expect(await dialog.findByText("There is no such node.")).toBeTruthy();
    expect(mock.sent.map(({ path }) => path)).toEqual([`/api/v1/admin${NODE}/quarantine`]);
  });
});

describe("a role that is revoked while a dialog is open", () => {
  it("is named by the page after the next answer, nothing is carried out, and what was typed is kept", async () => {
    openConsole(NODE);
    await userEvent.click(await screen.findByRole("button", { name: "Quarantine…" }));
    const dialog = within(await screen.findByRole("dialog"));
    await userEvent.type(dialog.getByRole("textbox", { name: "Reason" }), "noisy");
    mock.role = "user";
    mock.user = "root";
    answers(`/admin${NODE}/quarantine`, "POST").now(() => refusal(403, "forbidden", "The role admin is needed."));
    await userEvent.click(dialog.getByRole("button", { name: "Quarantine" }));
    expect(await screen.findByText(/This page needs the role admin/)).toBeTruthy();
    expect(screen.queryByRole("dialog")).toBeNull();
    expect(screen.queryByRole("link", { name: "Nodes" })).toBeNull();
    expect(mock.sent).toHaveLength(1);
    expect(JSON.stringify({ ...sessionStorage })).toContain("noisy");
  });
});

describe("an action that the service refuses", () => {
  it.each([
    [409, "node_in_use", {}, "Allocations are on the node. Retire it with `drain`, or release them first."],
    [409, "state_conflict", {}, "The node is being removed."],
    [400, "invalid_request", { field: "reason" }, "Field `reason` must not be empty."],
  ])("with %i %s shows the class and the way out, and leaves the form to be sent again under another key", async (status, code, details, message) => {
    openConsole(NODE);
    await userEvent.click(await screen.findByRole("button", { name: "Retire…" }));
    const dialog = within(await screen.findByRole("dialog"));
    await userEvent.type(dialog.getByRole("textbox", { name: "Reason" }), "old");
    const retire = answers(`/admin${NODE}/retire`, "POST");
    retire.now(() => refusal(status, code, message, {}, details));
    await userEvent.click(dialog.getByRole("button", { name: "Retire" }));
    const problem = await dialog.findByRole("alert");
    expect(problem.textContent).toContain(message.replace("Field `reason`", "“Reason”"));
    expect(within(problem).getByText(code)).toBeTruthy();
    retire.now(null);
    await userEvent.click(dialog.getByRole("button", { name: "Send again" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    expect(mock.sent.map(({ body }) => (body as { reason: string }).reason)).toEqual(["old", "old"]);
    expect(new Set(mock.sent.map(({ key }) => key)).size).toBe(2);
  });
});

describe("a bundle that is shown once", () => {
  const SECRET = "enrollment-token-7f21";
  const expires_at = new Date(Date.now() + 600_000).toISOString();

  it.each([
    ["the set-up command", "Set-up command…", `/nodes/${uuid(52)}`, "bootstrap-script", { command: `ssh root@gpu-2 ${SECRET}`, script: `echo ${SECRET}`, expires_at, format: "script", token_id: uuid(1) }],
    ["a new enrollment", "Enroll again…", NODE, "reissue-enrollment", { expires_at, token_id: uuid(1), recovery_bundle: { restart_command: `run ${SECRET}`, SVC_ENROLLMENT_TOKEN: SECRET } }],
  ])("as %s is in no storage, address or later page", async (_, label, address, way, body) => {
    answers(`/admin${address}/${way}`, "POST").now(() => Response.json(body, { status: 201 }));
    const { router } = openConsole(address);
    await userEvent.click(await screen.findByRole("button", { name: label }));
    const dialog = within(await screen.findByRole("dialog"));
    const reason = dialog.queryByRole("textbox", { name: "Reason" });
    if (reason) await userEvent.type(reason, "the disk was lost");
    await userEvent.click(dialog.getByRole("button", { name: label.replace("…", "") }));
    expect(await dialog.findByText("This is the only time that it is shown.")).toBeTruthy();
    expect(document.body.textContent).toContain(SECRET);
    const stored = () => JSON.stringify([{ ...sessionStorage }, { ...localStorage }, router.state.location.href]);
    expect(stored()).not.toContain(SECRET);
    await userEvent.click(dialog.getByRole("button", { name: "Close" }));
    await waitFor(() => expect(document.body.textContent).not.toContain(SECRET));
    // Opened again, the form is empty.
    await userEvent.click(screen.getByRole("button", { name: label }));
    await screen.findByRole("dialog");
    expect(document.body.textContent + stored()).not.toContain(SECRET);
  });
});

describe("the use of the fleet", () => {
  it("is shown for each SKU and region, with what is withheld", async () => {
    openConsole("/operations");
    const meter = await screen.findByRole<HTMLMeterElement>("meter", { name: "GPUs of h100-8 in use in eu-west-1" });
    expect([meter.value, meter.max]).toEqual([2, 24]);
    expect(meter.closest("td")?.textContent).toContain("8 %");
    expect(meter.closest("tr")?.querySelector('[data-title="Withheld"]')?.textContent).toBe("16");
  });

  it("withholds nothing where a count is late", () => {
    expect(withheldOf({ gpus_total: 8, gpus_held: 6, gpus_free: 4 })).toBe(0);
  });
});
