// Answers of the control plane in place of the usual ones.
import { mock } from "./setup.ts";

/** As the API lists: by pages, the oldest first where no other order is asked for. The items are given oldest first. */
export function paged<T>(all: readonly T[], query: URLSearchParams): Response {
  const items = query.get("order") === "newest_first" ? [...all].reverse() : all;
  const from = Number(query.get("page_token") ?? 0);
  const until = from + Number(query.get("limit") ?? 50);
  return Response.json({ items: items.slice(from, until), next_page: until < items.length ? String(until) : null });
}

/** Answers GET requests of a path. */
export function answers(path: string, answer: (query: URLSearchParams) => Response | Promise<Response>): void {
  mock.overrides.push(({ url, method }) => {
    const { pathname, searchParams } = new URL(url);
    return method === "GET" && pathname === path ? answer(searchParams) : null;
  });
}
