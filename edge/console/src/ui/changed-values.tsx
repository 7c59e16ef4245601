// What a form began with, where it has become something else since.
import type { FieldSpec } from "./action.tsx";
import { Plain } from "./text.tsx";
import type { Values } from "./use-draft.ts";

interface ChangedValue {
  field: FieldSpec;
  before: string;
  now: string;
}

/** The fields whose initial value that the form is based on is not that of this moment, nor is the form's. */
export function changedValues(fields: readonly FieldSpec[], values: Values, began: Values): ChangedValue[] {
  return fields.flatMap((field): ChangedValue[] => {
    const [before, now] = [began[field.name] ?? "", field.initial ?? ""];
    return field.kind === "hidden" || now === before || now === values[field.name] ? [] : [{ field, before, now }];
  });
}

function textOf({ kind }: FieldSpec, value: string): string {
  if (kind === "checkbox") return value === "yes" ? "chosen" : "not chosen";
  return value === "" ? "empty" : value;
}

/** Both values of each, and the question which of them the form goes on with. */
export function ChangedValues({ of: changed, take, keep }: { of: readonly ChangedValue[]; take: () => void; keep: () => void }) {
  return (
    <div className="problem" role="alert">
      <p>This has changed since you opened the form. Nothing is sent before you decide.</p>
      <ul className="plain-list">
        {changed.map(({ field, before, now }) => (
          <li key={field.name}>
            {field.label}: it is{" "}
            <strong>
              <Plain>{textOf(field, now)}</Plain>
            </strong>
            , and was <Plain>{textOf(field, before)}</Plain>.
          </li>
        ))}
      </ul>
      <div className="buttons">
        <button type="button" onClick={keep}>
          Keep what the form has
        </button>
        <button type="button" onClick={take}>
          Take the new values
        </button>
      </div>
    </div>
  );
}
