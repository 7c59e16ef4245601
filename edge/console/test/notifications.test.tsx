// Notifications, and their receivers.
import { describe, expect, it, vi } from "vitest";
import { screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { openMessages, remember, rememberRented, takeFromTab } from "../src/live/messages.ts";
import { logOut } from "../src/session/console-api.ts";
import { ago, allocation, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

describe("notifications", () => {
  const user = uuid(1);
  const messageAbout = (id: string, state: string, minutesAgo: number) => ({ id: `${id}-${state}`, type: `provisioning.${state}`, time: ago(minutesAgo), data: { allocation_id: id, state } });
  const rowsOf = async () => within((await screen.findByRole("heading", { name: "What happened" })).closest("section")!).getAllByRole("row").slice(1);

  it("that were received before a reload are still listed", async () => {
    openMessages(user);
    remember(messageAbout(allocation(1).id, "active", 3));
    // As a tab that is loaded again takes them up.
    openMessages(user);
    openConsole("/notifications");
    await screen.findByText("provisioning.active");
    expect(await rowsOf()).toHaveLength(1);
  });

  it("that no message brought are read out of the allocations, also of one that has ended", async () => {
    const [rented, ended] = [allocation(1), allocation(9, { state: "released" })];
    const history = (state: string, minutesAgo: number) => ({ state, reason: "by_hand", at: ago(minutesAgo) });
    mock.allocations = [
      { ...rented, status_history: [history("requested", 90), history("provisioning", 20), history("active", 19)] },
      { ...ended, status_history: [history("active", 90), history("released", 30)] },
    ];
    localStorage.setItem("gpuaas-notifications", JSON.stringify({ user, messages: [messageAbout(rented.id, "active", 19)], dismissed: [], connected_at: ago(60), rented: [rented.id, ended.id] }));
    openMessages(user);
    openConsole("/notifications");
    await waitFor(async () => expect(await rowsOf()).toHaveLength(3));
    const texts = (await rowsOf()).map((row) => row.textContent ?? "");
    expect(texts[0]).toContain("provisioning.active");
    expect(texts[1]).toMatch(/^provisioning: by hand.*read afterwards$/);
    expect(texts[2]).toMatch(/^released: by hand.*read afterwards$/);
  });

  it("of another user are not shown, and what the storage has is of no known form", async () => {
    for (const stored of [JSON.stringify({ user: uuid(2), messages: [messageAbout(allocation(1).id, "active", 3)], dismissed: [], connected_at: ago(60), rented: [] }), '{"user":7}', "{"]) {
      localStorage.setItem("gpuaas-notifications", stored);
      openMessages(user);
      const { unmount } = openConsole("/notifications");
      await screen.findByText("Nothing has happened since this browser was connected for the first time.");
      unmount();
    }
  });

  it("that another tab has dismissed are dismissed in this one, and stay so", () => {
    const announced = { id: "a1", type: "notification.announced", time: ago(1), data: { message: "maintenance" } };
    openMessages(user);
    remember(announced);
    const storedBy = (dismissed: string[]) => localStorage.setItem("gpuaas-notifications", JSON.stringify({ user, messages: [announced], dismissed, connected_at: null, rented: [] }));
    storedBy(["a1"]);
    takeFromTab({ key: "gpuaas-notifications" });
    remember(messageAbout(allocation(1).id, "active", 3));
    expect((JSON.parse(localStorage.getItem("gpuaas-notifications") ?? "") as { dismissed: string[] }).dismissed).toEqual(["a1"]);
  });

  it("are stored with what is rented where that has changed, and not at every poll", () => {
    openMessages(user);
    const writes = vi.spyOn(Storage.prototype, "setItem");
    for (const ids of [[uuid(1)], [uuid(1)], [uuid(1), uuid(2)], [uuid(1), uuid(2)], []]) rememberRented(ids);
    expect(writes.mock.calls.map(([, text]) => (JSON.parse(text) as { rented: string[] }).rented)).toEqual([[uuid(1)], [uuid(1), uuid(2)], []]);
    writes.mockRestore();
  });

  it("are gone after a logout", async () => {
    openMessages(user);
    remember(messageAbout(allocation(1).id, "active", 3));
    expect(localStorage.getItem("gpuaas-notifications")).toContain("provisioning.active");
    await logOut();
    expect(localStorage.getItem("gpuaas-notifications")).toBeNull();
  });
});

describe("a receiver of notifications", () => {
  it("is no e-mail where the login has no verified address", async () => {
    openConsole("/notifications");
    await userEvent.click(await screen.findByRole("button", { name: "Add…" }));
    const kind = (await screen.findByLabelText("Kind")) as HTMLSelectElement;
    expect([...kind.options].map(({ value }) => value)).toEqual(["webhook"]);
    expect(screen.getByText(/needs an address that your identity provider has verified/)).toBeTruthy();
  });
});
