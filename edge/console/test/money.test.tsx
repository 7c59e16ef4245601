// Balances, and the page of money.
import { describe, expect, it, vi } from "vitest";
import { act, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { eventStream } from "../src/live/browser.ts";
import { answers } from "./answers.ts";
import { posting } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

describe("balances", () => {
  it("of any size are exact", async () => {
    const huge = JSON.stringify({ ...mock.balance, available_minor: 0 }).replace('"available_minor":0', '"available_minor":9007199254740993');
    mock.overrides.push(({ url }) => (url.endsWith("/billing/balance") ? new Response(huge, { headers: { "Content-Type": "application/json" } }) : null));
    openConsole("/");
    await waitFor(() => expect(document.body.textContent?.replace(/[^\d.]/g, "")).toContain("90071992547409.93"));
  });
  it("that are used up say when what runs is released", async () => {
    mock.balance = { ...mock.balance, release_at: new Date(Date.now() + 600_000).toISOString(), is_low: true };
    openConsole("/");
    expect(await screen.findByText(/The balance is used up/)).toBeTruthy();
  });
});

describe("a payment that begins", () => {
  it("leaves its form open until the page of the payment is there, so that no second payment is begun", async () => {
    mock.overrides.push(({ url, method }) => (method === "POST" && url.endsWith("/checkout-sessions") ? Response.json({ id: "p1", url: "https://gpu.example/billing/checkout/1", expires_at: null }, { status: 201 }) : null));
    openConsole("/money");
    await userEvent.click(await screen.findByRole("button", { name: "Top up…" }));
    const dialog = within(await screen.findByRole("dialog"));
    await userEvent.type(dialog.getByLabelText("Amount in EUR"), "20.00");
    await userEvent.click(dialog.getByRole("button", { name: "Top up" }));
    const link = await dialog.findByRole("link", { name: "open it here" });
    expect(link.getAttribute("href")).toBe("https://gpu.example/billing/checkout/1");
    expect(dialog.queryByRole("button", { name: "Top up" })).toBeNull();
  });
});

describe("the page of money", () => {
  it("asks for the balance and the payments once, and pages of postings only where they are new", async () => {
    // With a stream, nothing is polled within a minute.
    vi.spyOn(eventStream, "current").mockReturnValue("live");
    const asked: string[] = [];
    mock.overrides.push(({ url }) => {
      asked.push(new URL(url).pathname.replace("/api/v1/billing/", ""));
      return null;
    });
    const { queries } = openConsole("/money");
    await screen.findByRole("group", { name: "Payments" });
    await screen.findByText("This month");
    const many = (path: string) => asked.filter((one) => one === path).length;
    expect([many("balance"), many("payments"), many("statements"), many("ledger")]).toEqual([1, 1, 1, 2]);
    asked.length = 0;
    answers("/api/v1/billing/ledger", () => Response.json({ items: [posting(0), ...mock.postings], next_page: "older" }));
    await act(() => queries.refetchQueries({ queryKey: ["spending"] }));
    expect(asked).toEqual(["ledger"]);
    const [read] = queries.getQueriesData<{ postings: { number: number }[] }>({ queryKey: ["spending"] });
    const numbers = read?.[1]?.postings.map(({ number }) => number) ?? [];
    expect(numbers.slice(0, 2)).toEqual([posting(0).number, posting(1).number]);
    expect(new Set(numbers).size).toBe(numbers.length);
  });
});
