// The command lines that a form shows while it is filled in.
import type { Locator } from "playwright-core";

/** A text that a shell, and a parser of options, would read otherwise where it is not quoted. */
const HARD_TEXT = `-it's "so" $HOME`;

/** What is typed, by the name of the field. */
const BY_NAME: Record<string, string> = {
  amount: "12.50",
  effective_at: "2100-01-01T00:00",
  labels: "env=dev, bare",
  regions: "eu-west-1, eu-north-1",
  region_code: "eu-west-1",
};

/** What is typed where the field has a pattern: the first that matches. */
const BY_PATTERN = ["-5", "EUR", `sha256:${"a".repeat(64)}`, "https://hooks.example/gpu?a=b&c=d", "xid/7*", "eu-west-1", `ssh-ed25519 ${"A".repeat(68)} ann@laptop`];

/** Every instant is this one: those of the fixtures are relative to the time of the test. */
const INSTANT = "2100-01-01T00:00:00Z";

/** Fills all fields in, tries each choice, and returns the lines that are shown then. */
export async function linesOf(place: Locator): Promise<string[]> {
  const lines = await place.evaluate(
    async (place, { hardText, byName, byPattern }) => {
      const shown = new Set<string>();
      const read = async () => {
        await new Promise((drawn) => setTimeout(drawn));
        for (const code of place.querySelectorAll("code")) {
          if (code.textContent?.startsWith("gpuctl ")) shown.add(code.textContent);
        }
      };
      const write = (field: Element, value: string) => {
        Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), "value")?.set?.call(field, value);
        field.dispatchEvent(new Event(field instanceof HTMLSelectElement ? "change" : "input", { bubbles: true }));
      };
      const sample = (field: HTMLInputElement | HTMLTextAreaElement) => {
        const pattern = field instanceof HTMLInputElement && field.pattern ? new RegExp(`^(?:${field.pattern})$`, "v") : null;
        if (pattern) return byPattern.find((text) => pattern.test(text)) ?? "";
        return byName[field.name] ?? (field.inputMode === "numeric" ? "2" : hardText);
      };
      const fieldsOf = <E extends Element>(selector: string) => [...place.querySelectorAll<E>(`form:has(.command-line) :is(${selector})`)];
      fieldsOf<HTMLInputElement>('input:not([type="checkbox"]), textarea').forEach((field) => write(field, sample(field)));
      const selects = fieldsOf<HTMLSelectElement>("select");
      selects.filter(({ required, value }) => required && value === "").forEach((field) => write(field, field.options[1]?.value ?? ""));
      await read();
      for (const field of selects) {
        for (const { value } of [...field.options].filter(({ value }) => value !== "")) {
          write(field, value);
          await read();
        }
      }
      for (const field of fieldsOf<HTMLInputElement>('input[type="checkbox"]')) {
        field.click();
        await read();
        field.click();
      }
      return [...shown];
    },
    { hardText: HARD_TEXT, byName: BY_NAME, byPattern: BY_PATTERN },
  );
  return lines.map((line) => line.replace(/\d{4}-\d\d-\d\dT[\d:.]+Z/g, INSTANT));
}
