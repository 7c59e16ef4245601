import { defineConfig } from "vitest/config";

export default defineConfig({ test: { include: ["test/chromium/screenshots.ts"], environment: "node", testTimeout: 600_000, hookTimeout: 120_000 } });
