// The console in a test, opened at an address.
import { render } from "@testing-library/react";
import { QueryClientProvider } from "@tanstack/react-query";
import { createMemoryHistory, RouterProvider } from "@tanstack/react-router";
import { newQueryClient } from "../src/api/query-client.ts";
import { newRouter } from "../src/router.tsx";

export function openConsole(address: string) {
  const queries = newQueryClient();
  const router = newRouter(queries);
  router.update({ ...router.options, history: createMemoryHistory({ initialEntries: [`/console${address}`] }) });
  const view = render(
    <QueryClientProvider client={queries}>
      <RouterProvider router={router} />
    </QueryClientProvider>,
  );
  return { ...view, router, queries };
}
