// What is measured on screen: jsdom lays nothing out, so that a virtual table would draw no row.
import { fireEvent } from "@testing-library/react";
import { vi } from "vitest";

/** The height of a measured row, and of the tables' part of the screen. */
export const ROW = 43;
export const SCREEN = 600;

/** Until the end of the test, tables have room for 14 rows. */
export function tallWindow(): void {
  vi.spyOn(Element.prototype, "clientWidth", "get").mockReturnValue(1000);
  vi.spyOn(Element.prototype, "clientHeight", "get").mockReturnValue(SCREEN);
  vi.spyOn(HTMLElement.prototype, "offsetHeight", "get").mockReturnValue(ROW);
}

export function scrollTo(table: HTMLElement, top: number): void {
  table.scrollTop = top;
  fireEvent.scroll(table);
}

/** The numbers of the rows that are drawn, as assistive technology is given them. The head is the first. */
export function rowNumbers(table: HTMLElement): number[] {
  return [...table.querySelectorAll(".virtual-row")].map((row) => Number(row.getAttribute("aria-rowindex")));
}
