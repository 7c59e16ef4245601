// What is shown to a browser without a session.
import { useEffect } from "react";
import { useRouter } from "@tanstack/react-router";
import { session } from "../api/client.ts";
import { loginUrl } from "../session/session.ts";
import { usePageTitle } from "../ui/page-title.ts";

export function LogIn() {
  usePageTitle("Log in");
  const here = window.location.pathname + window.location.search;
  const router = useRouter();
  // Another tab of this browser may log in first.
  useEffect(() => void session.restored().then(() => router.invalidate()), [router]);
  return (
    <main className="alone">
      <h1>GPU console</h1>
      <p>Rent GPU nodes, open terminals on them, and see what they cost.</p>
      <p>
        <a className="button primary" href={loginUrl(here)}>
          Log in
        </a>
      </p>
      <p className="soft">Your identity provider asks for your password; the console stores none.</p>
    </main>
  );
}
