// What a form began with, where it has become something else while the form is open.
import { useState } from "react";
import type { FieldSpec } from "./action.tsx";
import { Plain } from "./text.tsx";
import type { Values } from "./use-draft.ts";

interface ChangedValue {
  field: FieldSpec;
  before: string;
  now: string;
}

/** The fields whose value of the form's opening is not that of this moment, nor is the form's; and what marks them as seen. */
export function useChangedValues(fields: readonly FieldSpec[], values: Values): { changed: ChangedValue[]; seen: () => void } {
  const initial = Object.fromEntries(fields.map((field) => [field.name, field.initial ?? ""]));
  const [known, setKnown] = useState<Values>(initial);
  const changed = fields.flatMap((field): ChangedValue[] => {
    const [before, now] = [known[field.name] ?? "", field.initial ?? ""];
    return field.kind === "hidden" || now === before || now === values[field.name] ? [] : [{ field, before, now }];
  });
  return { changed, seen: () => setKnown(initial) };
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
