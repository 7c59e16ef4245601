// Dialogs and forms: what they say first, and what they need.
import { describe, expect, it } from "vitest";
import { screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { answers, paged } from "./answers.ts";
import { allocation, sshKey } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";
import { refusal } from "./mock-api.ts";

describe("a form that is refused", () => {
  it("names its own field, and no place in the request", async () => {
    const message = "Field `gpu_count` cannot be read: expected a whole number (line 1, column 99).";
    mock.overrides.push(({ method }) => (method === "POST" ? refusal(400, "invalid_request", message, {}, { field: "gpu_count", line: 1, column: 99 }) : null));
    openConsole("/rent?sku=h100-8");
    await userEvent.click(await screen.findByRole("button", { name: "Rent" }));
    expect(await screen.findByText("“GPUs” cannot be read: expected a whole number.")).toBeTruthy();
    expect(screen.getByText("0199e3f4-cafe")).toBeTruthy();
    expect(document.body.textContent).not.toMatch(/line 1|column/);
  });
});

describe("a release", () => {
  it("says its consequences and the command first, and then is one request", async () => {
    openConsole(`/allocations/${allocation(1).id}`);
    await userEvent.click(await screen.findByRole("button", { name: "Release…" }));
    const dialog = within(await screen.findByRole("dialog"));
    expect(dialog.getByText(/All local data/)).toBeTruthy();
    expect(dialog.getByText(`gpuctl allocations release ${allocation(1).id}`)).toBeTruthy();
    expect(mock.sent).toHaveLength(0);
    await userEvent.click(dialog.getByRole("button", { name: "Release" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    expect(mock.sent.map(({ method, path }) => `${method} ${path}`)).toEqual([`POST /api/v1/allocations/${allocation(1).id}/release`]);
    expect(mock.sent[0]?.key).toMatch(/^[0-9a-f-]{36}$/);
  });
  it("that is refused leaves the dialog with what was typed", async () => {
    mock.overrides.push(({ method }) => (method === "POST" ? refusal(409, "state_conflict", "It is released already.") : null));
    openConsole(`/allocations/${allocation(1).id}`);
    await userEvent.click(await screen.findByRole("button", { name: "Release…" }));
    await userEvent.type(await screen.findByLabelText(/Was something wrong/), "slow disk");
    await userEvent.click(screen.getByRole("button", { name: "Release" }));
    expect(await screen.findByText(/It is released already/)).toBeTruthy();
    expect((screen.getByLabelText(/Was something wrong/) as HTMLInputElement).value).toBe("slow disk");
  });
});

describe("a secret that is shown once", () => {
  it("is in no address, storage or later page", async () => {
    openConsole("/service-accounts");
    await userEvent.click(await screen.findByRole("button", { name: "New key…" }));
    await userEvent.click(await screen.findByRole("button", { name: "New key" }));
    expect(await screen.findByText("shown-once-3f9a")).toBeTruthy();
    const stored = JSON.stringify({ ...sessionStorage }) + JSON.stringify({ ...localStorage }) + window.location.href;
    expect(stored).not.toContain("shown-once");
    await userEvent.click(screen.getByRole("button", { name: "Close" }));
    await waitFor(() => expect(document.body.textContent).not.toContain("shown-once"));
  });
});

describe("the deletion of the default SSH key", () => {
  it("names the key that takes its place, the oldest other one", async () => {
    const keys = [
      { ...sshKey, id: "0198f000-0000-7000-8000-0000000000a1", name: "oldest", is_default: false },
      { ...sshKey, id: "0198f000-0000-7000-8000-0000000000a2", name: "newer", is_default: false },
      { ...sshKey, id: "0198f000-0000-7000-8000-0000000000a3", name: "laptop", is_default: true },
    ];
    answers("/api/v1/ssh-keys", (query) => paged(keys, query));
    openConsole("/ssh-keys");
    const row = within((await screen.findByText("laptop")).closest("tr")!);
    await userEvent.click(row.getByRole("button", { name: "Delete…" }));
    const dialog = await screen.findByRole("dialog");
    expect(dialog.textContent).toContain("It is the default key. oldest (");
    expect(dialog.textContent).toContain("becomes the default");
  });
});

describe("a policy's form", () => {
  it("opens once the values are read that it is compared with", async () => {
    mock.role = "admin";
    let release: () => void = () => {};
    const gate = new Promise<void>((opened) => (release = opened));
    answers("/api/v1/admin/policy-values", async (query) => {
      await gate;
      return paged([], query);
    });
    openConsole("/policies?key=allocation.max_concurrent_per_user");
    await screen.findByText(/How many allocations a user may have/);
    expect(screen.queryByRole("button", { name: "Set a value…" })).toBeNull();
    release();
    expect(await screen.findByRole("button", { name: "Set a value…" })).toBeTruthy();
  });
});

describe("the keys of an allocation", () => {
  it("are chosen once those of its user are read", async () => {
    let release: () => void = () => {};
    const gate = new Promise<void>((opened) => (release = opened));
    answers("/api/v1/ssh-keys", async (query) => {
      await gate;
      return paged([sshKey], query);
    });
    openConsole(`/allocations/${allocation(1).id}`);
    await screen.findByRole("button", { name: "Release…" });
    expect(screen.queryByRole("button", { name: "SSH keys…" })).toBeNull();
    release();
    expect(await screen.findByRole("button", { name: "SSH keys…" })).toBeTruthy();
  });
});
