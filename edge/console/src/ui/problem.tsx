// What went wrong.
import { useQueryClient } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { ApiFailure } from "../api/failure.ts";
import { may, meQuery } from "../session/me.ts";
import type { FieldSpec } from "./action.tsx";
import { refusalText } from "./refusal.ts";
import { Copyable, Plain } from "./text.tsx";

interface ProblemProps {
  error: unknown;
  again?: (() => void) | undefined;
  /** Those of the form that was refused. */
  fields?: readonly FieldSpec[];
}

/** What went wrong, as the API says it; a field of a form is named by its label. */
export function Problem({ error, again, fields = [] }: ProblemProps) {
  const failure = error instanceof ApiFailure ? error : null;
  const message = failure ? refusalText(failure, fields) : error instanceof Error ? error.message : String(error);
  return (
    <div className="problem" role="alert">
      <p>
        <Plain>{message}</Plain>
      </p>
      {failure?.retryAfter ? <p className="soft">The service asks to wait {failure.retryAfter} s.</p> : null}
      {failure?.correlationId && (
        <p className="soft">
          Code <code>{failure.code}</code> · correlation id <Copyable text={failure.correlationId} label="correlation id" /> <TraceLink of={failure.correlationId} />
        </p>
      )}
      {again && (
        <button type="button" onClick={again}>
          Try again
        </button>
      )}
    </div>
  );
}

/** The page of the request, for those who may see it. Where it is unknown who the caller is, there is none. */
function TraceLink({ of: correlation_id }: { of: string }) {
  const me = useQueryClient().getQueryData(meQuery.queryKey);
  if (!me || !may(me, "read_audit")) return null;
  return (
    <Link to="/requests" search={{ correlation_id } as never}>
      What the request did
    </Link>
  );
}
