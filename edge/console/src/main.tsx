// The console: its start.
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { QueryClientProvider } from "@tanstack/react-query";
import { RouterProvider } from "@tanstack/react-router";
import { session } from "./api/client.ts";
import { newQueryClient } from "./api/query-client.ts";
import { watchForOtherRelease } from "./layout/other-release.ts";
import { applyTheme } from "./layout/theme.ts";
import { followChanges } from "./live/follow.ts";
import { newRouter } from "./router.tsx";
import { closeLoginWindow, loadAgainWhenRestored } from "./session/session.ts";
import "./style/base.css";
import "./style/layout.css";

document.getElementById("not-started")?.remove();
watchForOtherRelease();
loadAgainWhenRestored(() => window.location.reload());
applyTheme();

const element = document.getElementById("console");
if (element) {
  const queries = newQueryClient();
  const router = newRouter(queries);
  session.subscribe(() => {
    const user = session.currentUser();
    if (session.current() !== "open" || user === null) return;
    closeLoginWindow();
    followChanges(queries, user);
  });
  createRoot(element).render(
    <StrictMode>
      <QueryClientProvider client={queries}>
        <RouterProvider router={router} />
      </QueryClientProvider>
    </StrictMode>,
  );
}
