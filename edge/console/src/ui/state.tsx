// States as a mark and a text.
import { readable } from "../format/text.ts";

export type Tone = "good" | "waits" | "bad" | "idle";

const TONES: Record<string, Tone> = {
  active: "good", ok: "good", open: "good", completed: "good", succeeded: "good", deposited: "good", awake: "good", running: "good", reachable: "good",
  requested: "waits", provisioning: "waits", releasing: "waits", enrolling: "waits", "bootstrap-issued": "waits", draining: "waits", warning: "waits",
  grace: "waits", created: "waits", paid: "waits", under_review: "waits", failing: "waits", backing_off: "waits", deprecated: "waits", awaits_operator: "waits", unknown: "idle", staged: "waits", held: "good", complete: "good", processed: "good", updated: "good", "under update": "waits",
  attached: "good", opened: "good", retrying: "waits", paused: "waits", aborting: "waits", detached: "waits", scheduled: "waits", resetting: "waits", withheld: "waits", stopped: "bad",
  "in force": "good", passed: "good", proved: "good", "in progress": "waits", "without proof": "bad", found: "waits", "not enough": "bad", faulty: "bad", missing: "bad", aborted: "idle", free: "idle",
  release_failed: "bad", offline: "bad", quarantined: "bad", critical: "bad", depleted: "bad", failed: "bad", refused: "bad", parked: "bad", dead: "bad",
  unreachable: "bad",
};

/** A state as text with a mark; the mark alone says nothing. */
export function State({ of, overdue = false }: { of: string; overdue?: boolean }) {
  return (
    <span className="state" data-tone={overdue ? "bad" : (TONES[of] ?? "idle")}>
      {readable(of)}
      {overdue && " · overdue"}
    </span>
  );
}
