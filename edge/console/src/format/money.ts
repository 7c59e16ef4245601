// Amounts as text, exact: whole minor units and millionths of them, never a fraction of a number.
import type { Whole } from "../api/lossless-json.ts";

const MICRO_DIGITS = 6;

/** How many digits the minor unit of a currency has. */
export function minorDigits(currency: string): number {
  try {
    return new Intl.NumberFormat("en", { style: "currency", currency }).resolvedOptions().maximumFractionDigits ?? 2;
  } catch {
    return 2;
  }
}

/** A whole number of 10^-digits as a decimal. */
function decimal(whole: Whole, digits: number): `${number}` {
  const value = BigInt(whole);
  const text = (value < 0n ? -value : value).toString().padStart(digits + 1, "0");
  const sign = value < 0n ? "-" : "";
  const fraction = digits === 0 ? "" : `.${text.slice(-digits)}`;
  return `${sign}${text.slice(0, text.length - digits)}${fraction}` as `${number}`;
}

function format(value: `${number}`, currency: string, digits: { least: number; most: number }): string {
  try {
    return new Intl.NumberFormat(undefined, {
      style: "currency",
      currency,
      minimumFractionDigits: digits.least,
      maximumFractionDigits: digits.most,
    }).format(value);
  } catch {
    return `${value} ${currency}`;
  }
}

/** An amount of minor units. Without a currency nothing was ever paid in. */
export function money(minor: Whole, currency: string | null | undefined): string {
  if (!currency) return BigInt(minor) === 0n ? "0" : String(minor);
  const digits = minorDigits(currency);
  return format(decimal(minor, digits), currency, { least: digits, most: digits });
}

/** An amount of millionths of a minor unit, with as many more digits as it needs, at most four. */
export function moneyMicro(micro: Whole, currency: string): string {
  const digits = minorDigits(currency);
  return format(decimal(micro, digits + MICRO_DIGITS), currency, { least: digits, most: digits + 4 });
}

/** How a posting, or a line of a statement, changed the balance. What was written off changed nothing, and is named as that. */
export function changeText(of: { kind: string; change_micro: Whole; amount_micro: Whole }, currency: string): string {
  if (of.kind === "write_off") return `${moneyMicro(of.amount_micro, currency)} written off`;
  if (of.kind === "write_off_reversal") return `${moneyMicro(of.amount_micro, currency)} no longer written off`;
  return moneyMicro(of.change_micro, currency);
}

/** The minor units of an amount that a person typed; or why it is none. */
export function parseMoney(text: string, currency: string): { minor: number } | { problem: string } {
  const digits = minorDigits(currency);
  const example = digits === 0 ? "20" : `20.${"0".repeat(digits)}`;
  const found = /^(\d{1,12})(?:\.(\d+))?$/.exec(text.trim());
  if (!found) return { problem: `Write the amount as ${example}, without a currency.` };
  const fraction = found[2] ?? "";
  if (fraction.length > digits) return { problem: `${currency} has ${digits} decimals: write ${example}.` };
  const minor = BigInt(`${found[1]}${fraction.padEnd(digits, "0")}`);
  if (minor < 1n || minor > BigInt(Number.MAX_SAFE_INTEGER)) return { problem: "The amount must be more than nothing." };
  return { minor: Number(minor) };
}

/** What a person typed as gpuctl takes it, with all decimals of the currency. */
export function commandAmount(text: string | undefined, currency: string | null | undefined): string | null {
  if (!text || !currency) return text ?? null;
  const amount = parseMoney(text, currency);
  return "problem" in amount ? text : plainAmount(amount.minor, currency);
}

/** The plain decimal of minor units, as gpuctl takes it. */
export function plainAmount(minor: Whole, currency: string): string {
  return decimal(minor, minorDigits(currency));
}
