// The dialog of an action.
import { Form } from "react-aria-components";
import { ApiFailure } from "../api/failure.ts";
import type { ActionSpec } from "./action.tsx";
import { Banners } from "../layout/banners.tsx";
import { ChangedValues, changedValues } from "./changed-values.tsx";
import { DialogFrame } from "./dialog.tsx";
import { Fields } from "./fields.tsx";
import { Problem } from "./problem.tsx";
import { SentBefore } from "./sent-before.tsx";
import { CommandLine } from "./text.tsx";
import { useDraft } from "./use-draft.ts";
import { useSend } from "./use-send.ts";
import { Waiting } from "./waiting.tsx";

interface ActionDialogProps {
  spec: ActionSpec<unknown>;
  /** What it is about is not on the page any more. */
  isGone: boolean;
  close: () => void;
}

export default function ActionDialog({ spec, isGone, close }: ActionDialogProps) {
  const fields = spec.fields ?? [];
  const initial = Object.fromEntries(fields.map((field) => [field.name, field.initial ?? ""]));
  const draft = useDraft(spec.id, initial);
  const changed = changedValues(fields, draft.values, draft.began);
  const sending = useSend({
    name: spec.id,
    send: spec.send,
    refreshes: spec.refreshes,
    done: (result) => {
      draft.discard();
      spec.done?.(result);
      if (!spec.result) close();
    },
  });
  const conflict = sending.error instanceof ApiFailure ? spec.conflict?.(sending.error, draft.values) : null;
  /** From here on the form is based on what the page shows at this moment. */
  const goOn = () => {
    fields.filter(({ kind }) => kind === "hidden").forEach(({ name, initial }) => draft.set(name, initial ?? ""));
    sending.changed();
    draft.rebase(initial);
  };
  /** By its button. Escape, which is pressed by accident, too, leaves what was typed for the next time. */
  const cancel = () => {
    if (sending.isSending) return;
    draft.discard();
    close();
  };
  return (
    <DialogFrame title={spec.title} close={close} isBusy={sending.isSending}>
      {/* What is outside a dialog cannot be reached while it is open. */}
      <Banners />
      {sending.isDone && spec.result ? (
        <>
          <div className="result">{spec.result(sending.result)}</div>
          <div className="buttons">
            <button type="button" className="primary" onClick={close} autoFocus>
              Close
            </button>
          </div>
        </>
      ) : (
        <Form
          onSubmit={(event) => {
            event.preventDefault();
            if (changed.length === 0) sending.submit(draft.values);
          }}
        >
          <div className="consequences">{typeof spec.consequences === "function" ? spec.consequences(draft.values) : spec.consequences}</div>
          <Fields
            of={fields}
            values={draft.values}
            set={(name, value) => {
              draft.set(name, value);
              sending.changed();
            }}
          />
          {changed.length > 0 && !sending.isSending && (
            <ChangedValues
              of={changed}
              keep={goOn}
              take={() => {
                changed.forEach(({ field, now }) => draft.set(field.name, now));
                goOn();
              }}
            />
          )}
          {isGone && !sending.isSending && (
            <p className="banner" data-tone="waits" role="alert">
              <span>The page has changed, and does not offer this any more. What you typed is here; the service says whether it can still be done.</span>
            </p>
          )}
          <Waiting isSending={sending.isSending} />
          {sending.error && <Problem error={sending.error} fields={fields} />}
          <SentBefore error={sending.error} beginAnew={sending.beginAnew} />
          {conflict && changed.length === 0 && (
            <div className="conflict">
              {conflict.note}
              <button
                type="button"
                onClick={() => {
                  Object.entries(conflict.values).forEach(([name, value]) => draft.set(name, value));
                  sending.changed();
                }}
              >
                {conflict.label}
              </button>
            </div>
          )}
          <CommandLine line={spec.command(draft.values)} />
          <div className="buttons">
            <button type="button" onClick={cancel} disabled={sending.isSending}>
              Cancel
            </button>
            <button type="submit" className={spec.danger ? "danger" : "primary"} disabled={sending.isSending || changed.length > 0}>
              {sending.isSending ? "Sending…" : sending.error ? "Send again" : spec.label.replace(/…$/, "")}
            </button>
          </div>
        </Form>
      )}
    </DialogFrame>
  );
}
