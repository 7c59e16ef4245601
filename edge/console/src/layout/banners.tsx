// What concerns the whole console: the session has ended, a new version is there, the device is offline.
import { useEffect, useRef, useState, useSyncExternalStore } from "react";
import { session } from "../api/client.ts";
import { useStreamStatus } from "../live/browser.ts";
import { dismiss, useAnnouncements } from "../live/messages.ts";
import { LOGGED_IN, logInInWindow, loginUrl } from "../session/session.ts";
import { Plain } from "../ui/text.tsx";
import { useMissingParts } from "./other-release.ts";

function useIsOnline(): boolean {
  return useSyncExternalStore(
    (changed) => {
      window.addEventListener("online", changed);
      window.addEventListener("offline", changed);
      return () => {
        window.removeEventListener("online", changed);
        window.removeEventListener("offline", changed);
      };
    },
    () => navigator.onLine,
  );
}

function OtherRelease({ missing }: { missing: number }) {
  const banner = useRef<HTMLParagraphElement>(null);
  // The button that opened nothing may be far below.
  useEffect(() => {
    // Its promise is no clean-up of the effect.
    void banner.current?.scrollIntoView({ block: "nearest" });
  }, [missing]);
  return (
    <p ref={banner} className="banner" data-tone="waits">
      <span>A part of this page could not be loaded: the service has another version of the console. What you typed is kept.</span>
      <button type="button" className="primary" onClick={() => window.location.reload()}>
        Reload
      </button>
    </p>
  );
}

/** What became of a press of the banner's buttons. */
type Outcome = "blocked" | "not-yet" | null;

function SessionEnded() {
  const [outcome, setOutcome] = useState<Outcome>(null);
  const check = async () => setOutcome((await session.check()) ? null : "not-yet");
  return (
    <>
      <p className="banner" data-tone="bad">
        <span>Your session has ended. Log in again: this page stays as it is, and what you sent goes on.</span>
        <button type="button" className="primary" onClick={() => setOutcome(logInInWindow() ? null : "blocked")}>
          Log in
        </button>
        <button type="button" onClick={() => void check()}>
          I have logged in
        </button>
      </p>
      {outcome === "blocked" && (
        <p className="banner" data-tone="waits">
          <span>The browser has blocked the window of the login.</span>
          <a className="button" href={loginUrl(LOGGED_IN)} target="_blank" rel="noopener">
            Log in in another tab
          </a>
        </p>
      )}
      {outcome === "not-yet" && <p className="soft page-note">The service sees no login in this browser yet.</p>}
    </>
  );
}

export function Banners() {
  const state = useSyncExternalStore(session.subscribe, session.current);
  const online = useIsOnline();
  const missing = useMissingParts();
  const stream = useStreamStatus();
  const announcements = useAnnouncements();
  return (
    <div className="banners" role="status">
      {state === "ended" && <SessionEnded />}
      {missing > 0 && <OtherRelease missing={missing} />}
      {announcements.map(({ id, data }) => (
        <p key={id} className="banner" data-tone={data.severity === "critical" ? "bad" : "waits"}>
          <span>
            <strong>The operators announce:</strong> <Plain>{data.message}</Plain>
          </span>
          <button type="button" onClick={() => dismiss(id)}>
            Dismiss
          </button>
        </p>
      ))}
      {online && state === "open" && stream === "off" && <p className="soft page-note">There are no live updates at the moment: views are read again every few seconds.</p>}
      {!online && (
        <p className="banner" data-tone="waits">
          <span>This device is offline. What you see was read before.</span>
        </p>
      )}
    </div>
  );
}
