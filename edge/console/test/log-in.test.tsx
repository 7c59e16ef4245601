// A browser that has no session yet: its first answer is a refusal.
import { describe, expect, it } from "vitest";
import { screen } from "@testing-library/react";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

describe("a browser without a session", () => {
  it("is offered the login, which returns to the page, and shows the page once another tab has logged in", async () => {
    mock.hasSession = false;
    window.history.replaceState({}, "", "/console/money?kind=usage");
    openConsole("/money?kind=usage");
    const login = await screen.findByRole("link", { name: "Log in" });
    expect(login.getAttribute("href")).toBe("/console/login?return_to=%2Fconsole%2Fmoney%3Fkind%3Dusage");
    // Another tab logs in.
    const elsewhere = new BroadcastChannel("gpuaas-session");
    mock.hasSession = true;
    elsewhere.postMessage("ann");
    await screen.findByRole("heading", { level: 1, name: "Money" });
    elsewhere.close();
  });
});
