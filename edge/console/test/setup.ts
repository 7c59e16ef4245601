// Before each test of a page: a fresh control plane, and what jsdom has not.
import { afterAll, afterEach, beforeAll, beforeEach, vi } from "vitest";
import { cleanup, configure } from "@testing-library/react";
import { http } from "msw";
import { setupServer } from "msw/node";
import { MockApi } from "./mock-api.ts";

// A machine that is busy draws a page in seconds.
configure({ asyncUtilTimeout: Number(process.env["CONSOLE_TEST_WAIT_MS"] ?? 60_000), getElementError: (message) => new Error(message?.slice(0, 1500) ?? "not found") });

export let mock = new MockApi();

const server = setupServer(
  http.all("*/api/*", ({ request }) => mock.answer(request)),
  http.all("*/console/*", ({ request }) => mock.answer(request)),
);

beforeAll(() => server.listen({ onUnhandledRequest: "error" }));
afterAll(() => server.close());

beforeEach(() => {
  mock = new MockApi();
  sessionStorage.clear();
  localStorage.clear();
});
afterEach(() => {
  cleanup();
  vi.restoreAllMocks();
});

window.scrollTo = () => {};
Element.prototype.scrollIntoView = () => {};
// A chart may be drawn after its test has ended. What is drawn is looked at in Chromium.
const context = new Proxy({}, { get: () => () => ({ width: 0 }), set: () => true });
HTMLCanvasElement.prototype.getContext = (() => context) as unknown as HTMLCanvasElement["getContext"];
vi.stubGlobal("Path2D", function Path2D() {
  return context;
});
Object.assign(globalThis, { CSS: { escape: (text: string) => text.replace(/[^\w-]/g, "\\$&") } });
globalThis.ResizeObserver ??= class {
  observe() {}
  unobserve() {}
  disconnect() {}
};
window.matchMedia ??= (query) => ({ matches: false, media: query, addEventListener() {}, removeEventListener() {}, addListener() {}, removeListener() {}, dispatchEvent: () => false, onchange: null });
