// What a refusal of a form says: it names the form's own field by its label.
import { ApiFailure } from "../api/failure.ts";
import type { FieldSpec } from "./action.tsx";

/** The form's field that a refusal is about: `details.field` is its path in the request, or that of a part of it. */
export function refusedField(failure: ApiFailure, fields: readonly FieldSpec[]): FieldSpec | null {
  const path = failure.details["field"];
  if (typeof path !== "string") return null;
  const isOf = ({ name, sentAs = name }: FieldSpec) => path === sentAs || path.startsWith(`${sentAs}.`) || path.startsWith(`${sentAs}[`);
  return fields.find(isOf) ?? null;
}

/** The message for the person who filled the form: the path of the field becomes its label. */
export function refusalText(failure: ApiFailure, fields: readonly FieldSpec[]): string {
  const field = refusedField(failure, fields);
  if (field === null) return failure.message;
  const label = `“${field.label}”`;
  const named = `\`${String(failure.details["field"])}\``;
  const text = failure.message.replaceAll(`Field ${named}`, label).replaceAll(named, label);
  return text.includes(label) ? text : `${label}: ${text}`;
}
