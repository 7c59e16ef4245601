// A form that was changed after a request of it without an answer.
import { ApiFailure } from "../api/failure.ts";

/** The service refuses the changed form under the key of that request, which has arrived. The person decides whether it is to be another one beside it. */
export function SentBefore({ error, beginAnew }: { error: unknown; beginAnew: () => void }) {
  if (!(error instanceof ApiFailure) || error.code !== "idempotency_key_reused") return null;
  return (
    <div className="conflict">
      <p>What you sent before you changed the form has arrived, and nothing was sent since. See first whether it was carried out: what you send from here on is done beside it.</p>
      <button type="button" onClick={beginAnew}>
        Send it as another request
      </button>
    </div>
  );
}
