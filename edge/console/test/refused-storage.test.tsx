// A browser that refuses its storage, or has no room left: the console goes on, and what was typed lasts as long as the page.
import { expect, it, vi } from "vitest";
import { screen, waitFor } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { openConsole } from "./render.tsx";
import { mock } from "./setup.ts";

it("keeps what was typed in a form, and the key of its request", async () => {
  vi.spyOn(Storage.prototype, "setItem").mockImplementation(() => {
    throw new DOMException("The quota has been exceeded.", "QuotaExceededError");
  });
  vi.spyOn(Storage.prototype, "getItem").mockImplementation(() => {
    throw new DOMException("The operation is insecure.", "SecurityError");
  });
  mock.overrides.push(({ method }) => (method === "POST" && mock.sent.length === 1 ? new Response("gone", { status: 502 }) : null));
  openConsole("/rent?sku=h100-8");
  await userEvent.type(await screen.findByLabelText(/Name/), "my-run");
  await userEvent.click(screen.getByRole("button", { name: "Rent" }));
  await userEvent.click(await screen.findByRole("button", { name: "Send again" }));
  await waitFor(() => expect(mock.sent).toHaveLength(2));
  expect(mock.sent.map(({ body }) => (body as { name: string }).name)).toEqual(["my-run", "my-run"]);
  expect(mock.sent[0]?.key).toBe(mock.sent[1]?.key);
});

it("shows its colours, and changes them", async () => {
  vi.spyOn(Storage.prototype, "getItem").mockImplementation(() => {
    throw new DOMException("The operation is insecure.", "SecurityError");
  });
  vi.spyOn(Storage.prototype, "setItem").mockImplementation(() => {
    throw new DOMException("The operation is insecure.", "SecurityError");
  });
  openConsole("/");
  await userEvent.click(await screen.findByRole("button", { name: "Colours: auto" }));
  expect(await screen.findByRole("button", { name: "Colours: light" })).toBeTruthy();
  expect(document.documentElement.dataset["theme"]).toBe("light");
});
