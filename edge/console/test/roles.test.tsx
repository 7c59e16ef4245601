// What each role is offered, and what a page says that its caller may not do.
import { describe, expect, it } from "vitest";
import { cleanup, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { answers } from "./answers.ts";
import { allocation, me, uuid } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";
import { refusal } from "./mock-api.ts";

const navigation = async () => within(await screen.findByRole("navigation", { name: "Console" }));

describe("what is offered", () => {
  it("to a user is no page of administrators", async () => {
    openConsole("/");
    const places = await navigation();
    expect(places.getByRole("link", { name: "Allocations" })).toBeTruthy();
    expect(places.queryByRole("link", { name: "Nodes" })).toBeNull();
    expect(places.queryByText("Operations")).toBeNull();
  });
  it("to an administrator is all of them", async () => {
    mock.role = "admin";
    openConsole("/");
    const places = await navigation();
    for (const name of ["Nodes", "SKUs", "Policies", "Audit log", "Fleet", "Tree", "Stuck"]) expect(places.getByRole("link", { name })).toBeTruthy();
  });
  it("names the role that a page needs", async () => {
    openConsole("/audit");
    expect(await screen.findByText(/needs the role admin or auditor/)).toBeTruthy();
  });
  it("names every role that is enough for a page of users", async () => {
    answers("/api/v1/me", () => Response.json({ ...me("user"), permissions: [] }));
    openConsole("/rent");
    expect(await screen.findByText(/needs the role user or admin\./)).toBeTruthy();
  });
});

describe("what a page is for, and its caller may not do,", () => {
  /** An administrator without some of what the fixtures give. */
  const mayNot = (...missing: string[]) => {
    mock.role = "operator";
    const all = me("operator");
    answers("/api/v1/me", () => Response.json({ ...all, permissions: all.permissions.filter((one) => !missing.includes(one)) }));
  };
  it.each([
    ["/payment-events", "To retry or dismiss an event you need the role billing_operations.", "Retry…"],
    [`/accounts/${uuid(1)}`, "To credit or debit this account you need the role billing_operations.", "Adjust…"],
    [`/accounts/${uuid(1)}`, "To settle or dismiss a payment under review you need the role billing_operations.", "Settle…"],
    [`/allocations/${allocation(3).id}`, "To retry the release you need the role admin.", "Retry the release…"],
    ["/stuck", "To retry or force the release you need the role admin.", "Force the release…"],
  ])("is named on %s with its role", async (address, sentence, button) => {
    mayNot("settle_processor_events", "adjust_billing", "rescue_allocations");
    openConsole(address);
    expect(await screen.findByText(sentence)).toBeTruthy();
    expect(screen.queryByRole("button", { name: button })).toBeNull();
    cleanup();
    mock.overrides.length = 0;
    openConsole(address);
    expect(await screen.findByRole("button", { name: button })).toBeTruthy();
    expect(screen.queryByText(sentence)).toBeNull();
  });
});

describe("the allocation of another user", () => {
  it("offers an administrator no terminal, and the end of one with a reason", async () => {
    mock.role = "admin";
    openConsole(`/allocations/${allocation(1).id}`);
    await userEvent.click(await screen.findByRole("button", { name: "End…" }));
    const dialog = within(await screen.findByRole("dialog"));
    expect(dialog.getByText(/^gpuctl terminal sessions kill/)).toBeTruthy();
    expect(dialog.getByLabelText("Reason")).toBeTruthy();
    expect(screen.queryByText("Open a terminal")).toBeNull();
  });
});

describe("a user whose roles were all taken back", () => {
  it("reads why nothing is shown, and can log out", async () => {
    answers("/api/v1/me", () => refusal(403, "forbidden", "Your account has neither the role `user` nor `admin`; ask an administrator for one."));
    openConsole("/");
    expect(await screen.findByText(/neither the role/)).toBeTruthy();
    await userEvent.click(screen.getByRole("button", { name: "Log out" }));
    await waitFor(() => expect(mock.sent.map(({ path }) => path)).toEqual(["/console/logout"]));
  });
});
