// Texts that are copied as a whole.
import { expect, it, vi } from "vitest";
import { render, screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { Copyable } from "../src/ui/text.tsx";

it("a text that has changed since is not called copied", async () => {
  const user = userEvent.setup();
  const { rerender } = render(<Copyable text="gpuctl nodes list" label="command" />);
  const button = screen.getByRole("button", { name: "Copy command" });
  await user.click(button);
  expect(button.textContent).toBe("Copied");
  rerender(<Copyable text="gpuctl nodes retire rack-1" label="command" />);
  expect(button.textContent).toBe("Copy");
  await user.click(button);
  expect(await navigator.clipboard.readText()).toBe("gpuctl nodes retire rack-1");
});

it("a browser that refuses to copy is named where it is seen", async () => {
  const user = userEvent.setup();
  render(<Copyable text="gpuctl nodes list" label="command" />);
  vi.spyOn(navigator.clipboard, "writeText").mockRejectedValue(new DOMException("denied", "NotAllowedError"));
  await user.click(screen.getByRole("button", { name: "Copy command" }));
  const note = await screen.findByText("The browser refuses to copy. Select the text.");
  expect(note.className).not.toContain("hidden");
});
