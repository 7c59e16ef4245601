// One request of a form: sent once, however often its button is pressed, and repeated under the same key.
import { useRef, useState } from "react";
import { ApiFailure } from "../api/failure.ts";
import { eventStream } from "../live/browser.ts";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { forgetKey, storeKey, unansweredKey } from "./use-draft.ts";

function isRefusal({ status, code }: ApiFailure): boolean {
  return status >= 400 && status < 500 && status !== 429 && code !== "idempotency_in_progress" && code !== "idempotency_key_reused";
}

/** Whether the request may have been carried out although it was not answered so. */
function hasNoAnswer({ status, code }: ApiFailure): boolean {
  return status === 0 || status >= 500 || code === "idempotency_in_progress" || code === "unreadable";
}

/** Nothing was sent: what the form showed is not so any more. The form shows what has changed, and asks again. */
export class Outdated extends Error {
  override readonly name = "Outdated";
}

interface SendOptions<V, R> {
  /** The form's name, as that of its draft, with which its key is discarded. */
  name: string;
  send: (values: V, key: string) => Promise<R>;
  refreshes: readonly string[];
  done: (result: R) => void;
}

/** The key is made when the form opens. Where the tab was reloaded before an answer arrived, it is the key of that request. */
export function useSend<V, R>({ name, send, refreshes, done }: SendOptions<V, R>) {
  const [key, setKey] = useState<string>(() => unansweredKey(name) ?? crypto.randomUUID());
  // A second click may come before React has drawn the disabled button.
  const inFlight = useRef(false);
  // A request under this key had no answer: it may have been carried out.
  const isUncertain = useRef(unansweredKey(name) !== null);
  const renew = () => {
    isUncertain.current = false;
    setKey(crypto.randomUUID());
  };
  const queries = useQueryClient();
  const mutation = useMutation({
    mutationFn: (values: V) => send(values, key),
    onSuccess: async (result) => {
      done(result);
      eventStream.sent(refreshes);
      await Promise.all(refreshes.map((name) => queries.invalidateQueries({ queryKey: [name] })));
    },
    onError: async (error) => {
      // After a request without an answer, its key stays.
      if (error instanceof Outdated && !isUncertain.current) forgetKey(name);
      if (!(error instanceof ApiFailure)) return;
      if (hasNoAnswer(error)) isUncertain.current = true;
      if (!isRefusal(error)) return;
      forgetKey(name);
      // The API answers a key that it has refused with the same refusal for a day, whatever has become of its cause.
      if (!isUncertain.current) renew();
      // The form is based on outdated data. The page reads it again before the refusal is shown.
      if (error.status === 409) await Promise.all(refreshes.map((name) => queries.invalidateQueries({ queryKey: [name] })));
    },
    onSettled: () => {
      inFlight.current = false;
    },
  });
  const submit = (values: V) => {
    if (inFlight.current) return;
    inFlight.current = true;
    storeKey(name, key);
    mutation.mutate(values);
  };
  /** What is sent changes after a refusal: a key belongs to one request. A request without an answer may have arrived, so its key stays: the API
   * refuses another request under it. */
  const changed = () => {
    if (mutation.error instanceof Outdated) mutation.reset();
    if (mutation.error instanceof ApiFailure && isRefusal(mutation.error)) {
      mutation.reset();
      renew();
    }
  };
  /** What is sent next is another request, beside one that has arrived. */
  const beginAnew = () => {
    forgetKey(name);
    mutation.reset();
    renew();
  };
  return { submit, changed, beginAnew, isSending: mutation.isPending, error: mutation.error, result: mutation.data, isDone: mutation.isSuccess };
}
