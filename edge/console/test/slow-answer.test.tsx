// Answers that arrive late, and those that never do.
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { act, fireEvent, screen, waitFor } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { session } from "../src/api/client.ts";
import { allocation } from "./fixtures.ts";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

/** The answer to the next POST, which the test gives. */
let answer: (response: Response) => void = () => {};

beforeEach(() => {
  const given = new Promise<Response>((arrived) => (answer = arrived));
  let isFirst = true;
  mock.overrides.push(({ method }) => {
    if (method !== "POST" || !isFirst) return null;
    isFirst = false;
    return given;
  });
  // The clock of the platform's own timeout is not that of the test.
  vi.spyOn(AbortSignal, "timeout").mockImplementation((milliseconds) => {
    const controller = new AbortController();
    setTimeout(() => controller.abort(new DOMException("The request took too long.", "TimeoutError")), milliseconds);
    return controller.signal;
  });
});
afterEach(() => {
  vi.useRealTimers();
});

/** From here on the test's clock decides. */
function stopClock(): void {
  vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout", "setInterval", "clearInterval"] });
}

/** Until it holds, while the clock of the test is stopped. */
async function settled(expectation: () => void): Promise<void> {
  for (const end = performance.now() + 60_000; ; ) {
    try {
      return expectation();
    } catch (error) {
      if (performance.now() > end) throw error;
    }
    await act(async () => {
      await vi.advanceTimersByTimeAsync(0);
      await new Promise((done) => setImmediate(done));
    });
  }
}

async function pass(seconds: number): Promise<void> {
  for (let second = 0; second < seconds; second += 1) {
    await act(async () => {
      await vi.advanceTimersByTimeAsync(1000);
      // What is not a timer goes on: requests and streams.
      await new Promise((done) => setImmediate(done));
    });
  }
}

/** Forms: how one is opened and sent, where it is afterwards, and the path of its request. */
const FORMS: readonly (readonly [form: string, address: string, open: () => Promise<HTMLElement>, path: string, isDone: () => Promise<unknown>])[] = [
  ["a rental", "/rent?sku=h100-8", () => screen.findByRole("button", { name: "Rent" }), "/api/v1/allocations", () => screen.findByRole("heading", { level: 1, name: /training-1/ })],
  [
    "a release",
    `/allocations/${allocation(1).id}`,
    async () => {
      await userEvent.click(await screen.findByRole("button", { name: "Release…" }));
      return screen.findByRole("button", { name: "Release" });
    },
    `/api/v1/allocations/${allocation(1).id}/release`,
    () => waitFor(() => expect(screen.queryByRole("dialog")).toBeNull()),
  ],
];

it("a form whose session has ended waits for the login, and does not say that it waits for the service", async () => {
  openConsole("/rent?sku=h100-8");
  const button = await screen.findByRole("button", { name: "Rent" });
  mock.hasSession = false;
  mock.overrides.length = 0;
  stopClock();
  fireEvent.click(button);
  await settled(() => expect(screen.getByText(/Your session has ended/)).toBeTruthy());
  await pass(7);
  expect(screen.getByText(/Your session has ended/)).toBeTruthy();
  expect(screen.queryByText(/has not answered yet/)).toBeNull();
  vi.useRealTimers();
  mock.hasSession = true;
  await session.check();
  await screen.findByRole("heading", { level: 1, name: /Allocation/ });
});

describe.each(FORMS)("the form of %s", (_form, address, open, path, isDone) => {
  const sent = () => mock.sent.filter((request) => request.path === path);

  it("whose answer takes 30 s says that it waits, is sent once, and ends with the answer", async () => {
    openConsole(address);
    const button = await open();
    stopClock();
    fireEvent.click(button);
    await settled(() => expect(sent()).toHaveLength(1));
    await pass(4);
    expect(screen.queryByText(/has not answered yet/)).toBeNull();
    await pass(26);
    await settled(() => expect(screen.getByText(/It is sent, and the service has not answered yet/).getAttribute("role")).toBe("status"));
    expect(button.textContent).toBe("Sending…");
    expect((button as HTMLButtonElement).disabled).toBe(true);
    fireEvent.submit(button.closest("form") as HTMLFormElement);
    await pass(1);
    expect(sent()).toHaveLength(1);
    vi.useRealTimers();
    answer(Response.json(allocation(1), { status: 202 }));
    await isDone();
    expect(screen.queryByText(/has not answered yet/)).toBeNull();
    expect(sent()).toHaveLength(1);
  });

  it("without an answer in 100 s says what to do next, and is sent again under the same key", async () => {
    openConsole(address);
    const button = await open();
    stopClock();
    fireEvent.click(button);
    await settled(() => expect(sent()).toHaveLength(1));
    await pass(99);
    expect(screen.queryByText(/No answer arrived/)).toBeNull();
    await pass(3);
    await settled(() => expect(screen.getByText("No answer arrived within 100 s. What you sent may have arrived. Send it again from here: that has no second effect.")).toBeTruthy());
    expect(screen.queryByText(/has not answered yet/)).toBeNull();
    expect(sent()).toHaveLength(1);
    vi.useRealTimers();
    await userEvent.click(screen.getByRole("button", { name: "Send again" }));
    await waitFor(() => expect(sent()).toHaveLength(2));
    expect(new Set(sent().map(({ key }) => key)).size).toBe(1);
  });
});
