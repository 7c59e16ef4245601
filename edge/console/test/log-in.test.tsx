// A browser that has no session yet: its first answer is a refusal.
import { describe, expect, it, vi } from "vitest";
import { act, screen, waitFor } from "@testing-library/react";
import { closeLoginWindow, loginUrl } from "../src/session/session.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

describe("a browser without a session", () => {
  it("is offered the login, which returns to the page, and shows the page once another tab has logged in", async () => {
    mock.hasSession = false;
    window.history.replaceState({}, "", "/console/money?kind=usage");
    const { router } = openConsole("/money?kind=usage");
    const login = await screen.findByRole("link", { name: "Log in" });
    expect(login.getAttribute("href")).toBe("/console/login?return_to=%2Fconsole%2Fmoney%3Fkind%3Dusage");
    // The browser's Back, and Forward.
    for (const address of ["/console/nodes", "/console/money?kind=usage"]) {
      window.history.replaceState({}, "", address);
      act(() => router.history.push(address));
      await waitFor(() => expect(returnTo(screen.getByRole<HTMLAnchorElement>("link", { name: "Log in" }).href)).toBe(address));
    }
    // Another tab logs in.
    const elsewhere = new BroadcastChannel("gpuaas-session");
    mock.hasSession = true;
    elsewhere.postMessage("ann");
    await screen.findByRole("heading", { level: 1, name: "Money" });
    elsewhere.close();
  });
});

const returnTo = (url: string) => new URL(url, "https://gpu.example").searchParams.get("return_to");

describe("the address of a login", () => {
  it("names a page that the service returns to: at most 1,024 characters, and no backslash", () => {
    expect(returnTo(loginUrl("/console/nodes?name=a\\b"))).toBe("/console/nodes?name=a%5Cb");
    const page = (length: number) => `/console/audit?actor=${"a".repeat(length - "/console/audit?actor=".length)}`;
    expect(returnTo(loginUrl(page(1024)))).toBe(page(1024));
    expect(returnTo(loginUrl(page(1025)))).toBe("/console/audit");
  });

  it("whose window ends on another page than the last one closes it all the same", () => {
    const close = vi.spyOn(window, "close").mockReturnValue();
    closeLoginWindow();
    expect(close).not.toHaveBeenCalled();
    window.name = "gpuaas-login";
    closeLoginWindow();
    window.name = "";
    expect(close).toHaveBeenCalledTimes(1);
  });
});
