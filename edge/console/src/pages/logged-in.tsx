// The last page of the small window of a login.
import { useEffect } from "react";
import { session } from "../api/client.ts";
import { usePageTitle } from "../ui/page-title.ts";

export function LoggedIn() {
  usePageTitle("Logged in");
  useEffect(() => {
    session.announce();
    window.close();
  }, []);
  return (
    <main className="alone">
      <h1>You are logged in</h1>
      <p>The page that you came from goes on. Close this window.</p>
    </main>
  );
}
