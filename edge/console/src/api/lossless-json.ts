// Amounts are whole numbers of up to 64 bits, and JavaScript's numbers are exact up to 53: larger ones are read as BigInt.

/** A whole number of the API, exact. */
export type Whole = number | bigint;

const MARK = "\u0000whole:";
// A string of the text, or a whole number of 16 digits and more; the digits after a point are none.
const TOKENS = /"(?:[^"\\]|\\.)*"|(?<![\d.])-?\d{16,}(?![\d.eE])/g;

/** `JSON.parse`, but for whole numbers beyond the exact range, which are BigInt. */
export function parseLossless(text: string): unknown {
  if (!/\d{16}/.test(text)) return JSON.parse(text);
  const marked = text.replace(TOKENS, (token) =>
    token.startsWith('"') || Number.isSafeInteger(Number(token)) ? token : `"\\u0000whole:${token}"`,
  );
  return JSON.parse(marked, (_, value: unknown) =>
    typeof value === "string" && value.startsWith(MARK) ? BigInt(value.slice(MARK.length)) : value,
  );
}
