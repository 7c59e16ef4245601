// Answers that are refused, cut or late.
import { describe, expect, it, vi } from "vitest";
import { screen } from "@testing-library/react";
import { ApiFailure } from "../src/api/failure.ts";
import { retries, retryDelay } from "../src/api/query-client.ts";
import { eventStream } from "../src/live/browser.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";
import { refusal } from "./mock-api.ts";

describe("answers that are no data", () => {
  it("of a busy service are read again after Retry-After", async () => {
    const tooMany = new ApiFailure(429, "rate_limited", "Too many requests.", null, 7);
    expect(retryDelay(0, tooMany)).toBeGreaterThanOrEqual(7000);
    expect(retries(0, tooMany)).toBe(true);
    expect(retries(0, new ApiFailure(409, "state_conflict", "No.", null, null))).toBe(false);
    // With a stream, nothing is polled within a minute.
    vi.spyOn(eventStream, "current").mockReturnValue("live");
    let asked = 0;
    mock.overrides.push(({ url }) => (url.includes("/ssh-keys") && ++asked < 2 ? refusal(429, "rate_limited", "Too many requests.", { "Retry-After": "1" }) : null));
    openConsole("/ssh-keys");
    expect(await screen.findByText("laptop")).toBeTruthy();
    expect(asked).toBe(2);
  });
  it("that are refused are shown with their message and correlation id", async () => {
    mock.overrides.push(({ url }) => (url.includes("/service-accounts") ? refusal(403, "forbidden", "This needs another role.") : null));
    openConsole("/service-accounts");
    expect(await screen.findByText("This needs another role.")).toBeTruthy();
    expect(screen.getByText("0199e3f4-cafe")).toBeTruthy();
  });
  it("that were cut say so", async () => {
    mock.overrides.push(({ url }) => (url.includes("/ssh-keys") ? new Response('{"items":[', { headers: { "Content-Type": "application/json" } }) : null));
    openConsole("/ssh-keys");
    expect(await screen.findByText(/arrived in part/)).toBeTruthy();
  });
});
