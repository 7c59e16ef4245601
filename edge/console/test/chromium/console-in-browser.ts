// The console over its mocked control plane, and a browser: for all tests of the file that imports them, from its first test to its last.
import { afterAll, beforeAll } from "vitest";
import type { Browser } from "playwright-core";
import { launch } from "./browser.ts";
import { startConsole, type ConsoleServer } from "./server.ts";

export let server: ConsoleServer;
export let browser: Browser;

beforeAll(async () => {
  server = await startConsole();
  browser = await launch();
});
afterAll(async () => {
  await browser?.close();
  await server?.close();
});
