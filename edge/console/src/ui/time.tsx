// Instants as text.
import { localTime, relativeTime, utcTime } from "../format/time.ts";
import { useNow } from "./now.ts";

/** An instant: how long ago, with local time and UTC where the pointer rests. */
export function When({ at }: { at: string | null | undefined }) {
  const now = useNow();
  if (!at) return <span className="soft">–</span>;
  return (
    <time dateTime={at} title={`${localTime(at)} · ${utcTime(at)}`}>
      {relativeTime(at, now)}
    </time>
  );
}

/** An instant in full: local time, and UTC beside it. */
export function FullTime({ at }: { at: string | null | undefined }) {
  if (!at) return <span className="soft">–</span>;
  return (
    <time dateTime={at}>
      {localTime(at)} <span className="soft">({utcTime(at)})</span>
    </time>
  );
}
