// The requests about logins in a browser: they are the console's own.
import { api, dataOf, sendOnce, session, type Schemas } from "../api/client.ts";
import { ApiFailure } from "../api/failure.ts";
import { forgetMessages } from "../live/messages.ts";
import { forgetTab } from "../ui/browser-storage.ts";

/** A login in a browser, as its user sees it. */
export type BrowserSessionView = Schemas["BrowserSession"];

/** A page of the sessions that have not ended. */
export function sessionsPage(page: string | undefined) {
  return dataOf(api.GET("/api/v1/me/sessions", { params: { query: { state: "active", ...(page ? { page_token: page } : {}) } } }));
}

export function endSession(id: string, key: string): Promise<unknown> {
  return dataOf(api.POST("/api/v1/me/sessions/{id}/end", { params: { path: { id } }, headers: { "Idempotency-Key": key } }));
}

/** Ends this session, and says where the browser goes next: to end the identity provider's session, where that has a page for it. A session that
 * has ended before needs no login to be left. */
export async function logOut(): Promise<string> {
  const to = await ended().catch((error: unknown) => {
    if (error instanceof ApiFailure && error.status === 401) return null;
    throw error;
  });
  // What this user typed and received is not shown to the next one, in no tab.
  forgetTab();
  forgetMessages();
  session.left();
  return to ?? "/console/";
}

async function ended(): Promise<string | null> {
  // For browsers alone: it is not in the description of the API.
  const response = await sendOnce(new Request(new URL("/console/logout", window.location.origin), { method: "POST" }));
  return ((await response.json()) as { logout_url: string | null }).logout_url;
}
