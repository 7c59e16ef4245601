// Views of queries: their data, its age, and why it is not there.
import type { ReactNode } from "react";
import type { UseQueryResult } from "@tanstack/react-query";
import { deviceAheadMs } from "../api/service-clock.ts";
import { relativeTime } from "../format/time.ts";
import { useStreamStatus } from "../live/browser.ts";
import { useMay } from "../session/me.ts";
import { useNow } from "./now.ts";
import { Problem } from "./problem.tsx";

interface Again {
  refetch: () => Promise<unknown>;
}

interface AgeProps {
  query: Pick<UseQueryResult, "dataUpdatedAt" | "error" | "failureReason"> & Again;
  /** No message reports its changes. */
  polled?: boolean;
  /** Messages report its changes to operators alone. */
  ofOperators?: boolean;
}

/** How old the shown data is, and whether it could not be read again. */
export function Age({ query, polled = false, ofOperators = false }: AgeProps) {
  const now = useNow();
  const may = useMay();
  // What the stream does not report is as old as its last read.
  const isReported = !polled && (!ofOperators || may("operate_runtime"));
  const isLive = useStreamStatus() === "live" && isReported;
  if (query.dataUpdatedAt === 0) return null;
  // By the device's clock, as `now` is by the service's.
  const readAt = query.dataUpdatedAt - deviceAheadMs();
  const seconds = Math.max(0, Math.round((now - readAt) / 1000));
  const failed = query.error ?? query.failureReason;
  return (
    <span className="age" data-old={(seconds > 60 && !isLive) || undefined}>
      {failed ? "Not read since " : "As of "}
      {seconds < 3 ? (failed ? "a moment ago" : "now") : relativeTime(new Date(readAt).toISOString(), now)}
      {isLive && !failed && " · live"}
      <button type="button" className="quiet" onClick={() => void query.refetch()} aria-label="Read again">
        ↻
      </button>
    </span>
  );
}

/** A view of a query: its data, a sign that it is on the way, or why it is not there. */
export function Loaded<T>({ query, children }: { query: Pick<UseQueryResult<T>, "data" | "error" | "failureReason" | "isPlaceholderData"> & Again; children: (data: T) => ReactNode }) {
  if (query.data !== undefined) {
    return (
      <>
        {query.error && <Problem error={query.error} again={() => void query.refetch()} />}
        {/* The rows of the page or the filter before stay until those that were asked for arrive. */}
        {query.isPlaceholderData && <Reading failure={query.failureReason} />}
        {children(query.data)}
      </>
    );
  }
  if (query.error) return <Problem error={query.error} again={() => void query.refetch()} />;
  return <Reading failure={query.failureReason} />;
}

/** It is on the way; after a failure it is tried again by itself. */
function Reading({ failure }: { failure: Error | null }) {
  return (
    <>
      {failure && <Problem error={failure} />}
      <p className="loading" role="status">
        Loading…
      </p>
    </>
  );
}
