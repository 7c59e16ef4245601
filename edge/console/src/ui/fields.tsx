// The fields of a form, out of their description.
import { useId } from "react";
import { FieldError, Input, Label, Text, TextArea, TextField } from "react-aria-components";
import type { FieldSpec } from "./action.tsx";
import type { Values } from "./use-draft.ts";

interface FieldsProps {
  of: readonly FieldSpec[];
  values: Values;
  set: (name: string, value: string) => void;
}

export function Fields({ of, values, set }: FieldsProps) {
  return of.map((field) => <Field key={field.name} spec={field} value={values[field.name] ?? ""} set={(value) => set(field.name, value)} />);
}

export function Field({ spec, value, set }: { spec: FieldSpec; value: string; set: (value: string) => void }) {
  switch (spec.kind ?? "text") {
    case "select":
      return <SelectField spec={spec} value={value} set={set} />;
    case "hidden":
      return null;
    case "checkbox":
      return <CheckboxField spec={spec} value={value} set={set} />;
    default:
      return <TypedField spec={spec} value={value} set={set} />;
  }
}

type One = { spec: FieldSpec; value: string; set: (value: string) => void };

function TypedField({ spec, value, set }: One) {
  const isNumber = spec.kind === "number";
  return (
    <TextField
      className="field"
      name={spec.name}
      value={value}
      onChange={set}
      isRequired={spec.required ?? false}
      {...(isNumber ? { type: "text" as const, inputMode: "numeric" as const } : {})}
      {...(spec.maxLength === undefined ? {} : { maxLength: spec.maxLength })}
      {...(spec.pattern === undefined ? {} : { pattern: spec.pattern })}
      validate={(typed) => (isNumber && typed !== "" ? numberProblem(typed, spec) : null)}
      validationBehavior="native"
      autoComplete="off"
    >
      <Label>
        {spec.label}
        {!spec.required && <span className="soft"> (optional)</span>}
      </Label>
      {spec.kind === "area" ? <TextArea rows={4} dir="auto" /> : <Input dir="auto" />}
      {spec.help && (
        <Text slot="description" className="help">
          {spec.help}
        </Text>
      )}
      <FieldError className="field-error" />
    </TextField>
  );
}

export function numberProblem(typed: string, { min, max }: Pick<FieldSpec, "min" | "max">): string | null {
  if (!/^\d{1,12}$/.test(typed)) return "Write a whole number.";
  const value = Number(typed);
  if (min !== undefined && value < min) return `At least ${min}.`;
  if (max !== undefined && value > max) return `At most ${max}.`;
  return null;
}

function SelectField({ spec, value, set }: One) {
  const id = useId();
  const isOffered = value === "" || (spec.options ?? []).some((option) => option.value === value);
  return (
    <div className="field">
      <label htmlFor={id}>
        {spec.label}
        {!spec.required && <span className="soft"> (optional)</span>}
      </label>
      <select id={id} name={spec.name} value={value} required={spec.required} onChange={(event) => set(event.target.value)} aria-describedby={`${id}-help`}>
        {(!spec.required || value === "") && <option value="">{spec.required ? "Choose…" : "–"}</option>}
        {/* What was chosen before the options changed is what would be sent. */}
        {!isOffered && <option value={value}>{value}, not offered</option>}
        {spec.options?.map((option) => (
          <option key={option.value} value={option.value}>
            {option.label}
          </option>
        ))}
      </select>
      <span id={`${id}-help`} className="help">
        {spec.help}
      </span>
    </div>
  );
}

function CheckboxField({ spec, value, set }: One) {
  return (
    <div className="field">
      <label className="check">
        <input type="checkbox" name={spec.name} checked={value === "yes"} onChange={(event) => set(event.target.checked ? "yes" : "")} />
        {spec.label}
      </label>
      {spec.help && <span className="help">{spec.help}</span>}
    </div>
  );
}
