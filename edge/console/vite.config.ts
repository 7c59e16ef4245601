import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

// The control plane that `npm run dev` shows; its certificate is not checked.
const api = process.env["GPUAAS_URL"] ?? "https://127.0.0.1:8443";
const proxied = { target: api, secure: false, changeOrigin: true };

export default defineConfig({
  base: "/console/",
  plugins: [react()],
  build: {
    // No inline styles or data: images: the content security policy allows neither.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
    reportCompressedSize: false,
    manifest: true,
    // The licences of what is built in ask for their text beside it.
    license: { fileName: "assets/licenses.md" },
  },
  server: { proxy: { "/api": proxied, "/terminal": proxied, "/console/login": proxied, "/console/callback": proxied, "/console/logout": proxied } },
});
