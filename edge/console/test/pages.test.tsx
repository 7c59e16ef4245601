// What is true of any page: its title, its keys, its age, and names of other people.
import { describe, expect, it, vi } from "vitest";
import { act, cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { eventStream } from "../src/live/browser.ts";
import { answers } from "./answers.ts";
import { allocation, me, node, STRANGE_NAMES, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";
import { refusal } from "./mock-api.ts";

describe("the title of the browser's tab", () => {
  it.each([
    ["/allocations", "Allocations · gpuaas"],
    [`/allocations/${allocation(1).id}`, "training-1 · gpuaas"],
    [`/nodes/${node(0).id}`, "rack-0 · gpuaas"],
    ["/nowhere", "No such page · gpuaas"],
  ])("of %s is %s", async (address, title) => {
    mock.role = "admin";
    openConsole(address);
    await waitFor(() => expect(document.title).toBe(title));
  });
  it("of a page that is refused is not that of the page before", async () => {
    const { router } = openConsole("/money");
    await waitFor(() => expect(document.title).toBe("Money · gpuaas"));
    act(() => router.history.push("/console/audit"));
    await waitFor(() => expect(document.title).toBe("Another role is needed · gpuaas"));
  });
  it("of a page that cannot be read is the site's alone", async () => {
    const { router } = openConsole("/allocations");
    await waitFor(() => expect(document.title).toBe("Allocations · gpuaas"));
    answers(`/api/v1/allocations/${uuid(4)}`, () => refusal(404, "not_found", "There is no such allocation."));
    act(() => router.history.push(`/console/allocations/${uuid(4)}`));
    await screen.findByText("There is no such allocation.");
    await waitFor(() => expect(document.title).toBe("gpuaas"));
  });
});

describe("the keyboard", () => {
  it("opens pages, the list of shortcuts and the palette", async () => {
    const { router } = openConsole("/");
    await screen.findByRole("heading", { level: 1, name: "Overview" });
    // Without a pause between the two, which a busy machine may make longer than the console waits.
    fireEvent.keyDown(document.body, { key: "g" });
    fireEvent.keyDown(document.body, { key: "m" });
    await screen.findByRole("heading", { level: 1, name: "Money" });
    expect(router.state.location.pathname).toBe("/money");
    await userEvent.keyboard("?");
    expect(await screen.findByRole("dialog", { name: "Keyboard shortcuts" })).toBeTruthy();
    await userEvent.keyboard("{Escape}");
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    await userEvent.keyboard("{Control>}k{/Control}");
    const field = await screen.findByRole("combobox", { name: /Name of a page/ });
    const shown = vi.spyOn(Element.prototype, "scrollIntoView");
    await userEvent.type(field, "{ArrowDown}{ArrowDown}");
    // The focus stays in the field, so that the browser does not scroll the list to what is chosen.
    expect((shown.mock.contexts.at(-1) as HTMLElement).id).toBe(field.getAttribute("aria-activedescendant"));
    await userEvent.type(field, "catal{Enter}");
    await screen.findByRole("heading", { level: 1, name: "Catalog" });
    await waitFor(() => expect(document.activeElement?.tagName).toBe("H1"));
  });

  it("opens nothing by single keys once they are switched off, which the browser remembers", async () => {
    const { router } = openConsole("/");
    await screen.findByRole("heading", { level: 1, name: "Overview" });
    expect(screen.getByRole("link", { name: "Money" }).getAttribute("aria-keyshortcuts")).toBe("g m");
    await userEvent.keyboard("?");
    await userEvent.click(await screen.findByRole("checkbox", { name: "Shortcuts of single keys" }));
    expect(within(screen.getByRole("dialog")).queryByText("Catalog")).toBeNull();
    await userEvent.keyboard("{Escape}");
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    const pressed = async () => {
      for (const key of ["g", "m", "?"]) fireEvent.keyDown(document.body, { key });
      // Ctrl+K is no single key.
      fireEvent.keyDown(document.body, { key: "k", ctrlKey: true });
      await screen.findByRole("dialog", { name: "Open a page" });
      expect(screen.queryByRole("dialog", { name: "Keyboard shortcuts" })).toBeNull();
    };
    await pressed();
    expect(router.state.location.pathname).toBe("/");
    expect(document.querySelector("nav [aria-keyshortcuts], nav kbd")).toBeNull();
    cleanup();
    openConsole("/");
    await screen.findByRole("heading", { level: 1, name: "Overview" });
    await pressed();
    // They are switched on where they were switched off.
    fireEvent.keyDown(document.body, { key: "Escape" });
    await userEvent.click(await screen.findByRole("button", { name: "Keyboard shortcuts", hidden: true }));
    await userEvent.click(await screen.findByRole("checkbox", { name: "Shortcuts of single keys" }));
    expect(within(screen.getByRole("dialog")).getByText("Catalog")).toBeTruthy();
  });

  it("of a browser that fills a field in, which reports a key without a name, changes nothing", async () => {
    openConsole("/");
    await screen.findByRole("heading", { level: 1, name: "Overview" });
    const failed = vi.fn();
    window.addEventListener("error", failed);
    document.body.dispatchEvent(new Event("keydown", { bubbles: true }));
    window.removeEventListener("error", failed);
    expect(failed).not.toHaveBeenCalled();
  });

  it("closes a dialog by Escape while nothing has the focus", async () => {
    openConsole("/");
    await screen.findByRole("heading", { level: 1, name: "Overview" });
    await userEvent.keyboard("?");
    await screen.findByRole("dialog", { name: "Keyboard shortcuts" });
    fireEvent.keyDown(document.body, { key: "Escape" });
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  });
});

describe("the age of a view", () => {
  it.each([
    ["/catalog", "main"],
    ["/rent?sku=h100-8", "aside"],
    [`/allocations/${allocation(1).id}`, "section:has([aria-label='GPUs'])"],
    ["/audit", "main"],
    ["/operations", "section:has([aria-label='Members'])"],
    ["/operations", ".page-head"],
    ["/stuck", ".page-head"],
    ["/tree", ".page-head"],
    [`/entities/allocation/${uuid(103)}`, ".page-head"],
  ])("of %s says that it is not live: no message reports what it shows", async (address, view) => {
    mock.role = "admin";
    vi.spyOn(eventStream, "current").mockReturnValue("live");
    openConsole(address);
    const ageOf = () => document.querySelector(view)?.querySelector(".age")?.textContent;
    await waitFor(() => expect(ageOf()).toMatch(/^As of /));
    expect(ageOf()).not.toContain("live");
    cleanup();
    openConsole("/ssh-keys");
    await waitFor(() => expect(document.querySelector("main .age")?.textContent).toMatch(/^As of .* · live/));
  });
});

describe("the age of what messages report to operators alone", () => {
  it.each([
    ["/ssh-keys", "SSH keys"],
    ["/service-accounts", "Service accounts"],
    ["/notifications", "Notifications"],
    ["/sessions", "Sessions"],
  ])("of %s says live to an operator, and not to a user", async (address, title) => {
    vi.spyOn(eventStream, "current").mockReturnValue("live");
    const ageOf = async (role: "user" | "admin") => {
      mock.role = role;
      const { unmount } = openConsole(address);
      await screen.findByRole("heading", { level: 1, name: title });
      await waitFor(() => expect(document.querySelector(".page-head .age")?.textContent).toMatch(/^As of /));
      const text = document.querySelector(".page-head .age")?.textContent;
      unmount();
      return text;
    };
    expect(await ageOf("user")).not.toContain("live");
    expect(await ageOf("admin")).toContain("live");
  });
  it.each([
    ["/accounts", "see_billing", 1],
    [`/accounts/${uuid(1)}`, "see_billing", 4],
    ["/payment-events", "see_billing", 1],
    ["/skus", "see_skus", 1],
  ] as const)("of %s says live to an operator, and not to a caller with %s alone", async (address, permission, views) => {
    vi.spyOn(eventStream, "current").mockReturnValue("live");
    const user = me("user");
    let caller = { ...user, permissions: [...user.permissions, permission] };
    answers("/api/v1/me", () => Response.json(caller));
    const ages = async () => {
      const { unmount } = openConsole(address);
      const texts = () => [...document.querySelectorAll("main .age")].map(({ textContent }) => textContent);
      await waitFor(() => expect(texts()).toHaveLength(views));
      const found = texts();
      unmount();
      return found;
    };
    expect((await ages()).filter((age) => age.includes("live"))).toEqual([]);
    caller = { ...me("admin"), user_id: user.user_id, permissions: [...me("admin").permissions] };
    expect((await ages()).filter((age) => age.includes("live"))).toHaveLength(views);
  });
});

describe("names of other people", () => {
  it("are text, whatever they contain", async () => {
    openConsole("/allocations");
    for (const name of STRANGE_NAMES) expect(await screen.findByText(name)).toBeTruthy();
    expect(document.querySelector("main img, main script")).toBeNull();
  });
});
