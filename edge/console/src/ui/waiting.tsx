// A form whose answer takes long.
import { useEffect, useState, useSyncExternalStore } from "react";
import { session } from "../api/client.ts";

/** An answer that arrives sooner needs no explanation. */
const SLOW_MS = 5_000;

/** Says that the form waits, and that it is sent. */
export function Waiting({ isSending }: { isSending: boolean }) {
  const [isSlow, setSlow] = useState(false);
  useEffect(() => {
    if (!isSending) return;
    const timer = setTimeout(() => setSlow(true), SLOW_MS);
    return () => {
      clearTimeout(timer);
      setSlow(false);
    };
  }, [isSending]);
  const state = useSyncExternalStore(session.subscribe, session.current);
  // What waits for a login says that by its banner.
  if (!isSlow || state === "ended") return null;
  return (
    <p className="soft" role="status">
      It is sent, and the service has not answered yet. Wait: you need not send it again.
    </p>
  );
}
