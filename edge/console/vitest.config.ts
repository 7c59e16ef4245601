import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

const inDom = { environment: "jsdom", setupFiles: ["test/setup.ts"], environmentOptions: { jsdom: { url: "https://gpu.example/console/" } } };

export default defineConfig({
  plugins: [react()],
  test: {
    // A page in Chromium draws within seconds; a machine that is busy takes longer, and one test opens dozens. Each wait in it has its own limit.
    testTimeout: 900_000,
    hookTimeout: 300_000,
    teardownTimeout: 60_000,
    // The files in Chromium mostly wait for pages: by default, a machine with two cores would run one at a time.
    maxWorkers: 3,
    // As those of the Rust tests: a snapshot is reviewed, and written where it is asked for.
    update: process.env["INSTA_UPDATE"] === "always" ? "all" : "none",
    // `deploy/test` runs the units, and with --all the others as well.
    projects: [
      { extends: true, test: { name: "units", include: ["test/*.test.ts"], ...inDom } },
      { extends: true, test: { name: "pages", include: ["test/*.test.tsx"], ...inDom } },
      { extends: true, test: { name: "chromium", include: ["test/chromium/*.test.ts"], environment: "node" } },
    ],
  },
});
