// The accessibility tree of a page as text: what a screen reader reads, in its order. Times and ids are masked.
import { existsSync, readFileSync } from "node:fs";
import { expect } from "vitest";
import type { Page } from "playwright-core";

const MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)";
const CLOCK = String.raw`\d{2}:\d{2}(?::\d{2})?`;

const MASKS: [RegExp, string][] = [
  [/[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}/g, "ID"],
  [/\b[0-9a-f]{4}…[0-9a-f]{8}\b/g, "ID"],
  [/\d{4}-\d{2}-\d{2}T[\d:.]+(?:Z|[+-]\d{2}:\d{2})/g, "TIME"],
  [new RegExp(String.raw`\b\d{1,2} ${MONTH} \d{4}(?:, ${CLOCK})?(?: \(TIME\))?(?: UTC)?`, "g"), "TIME"],
  [/\b(?:in )?\d+ (?:second|minute|hour|day|month|year)s?(?: ago)?\b/g, "TIME"],
  [/\b(?:yesterday|today|tomorrow|(?:last|this|next) (?:minute|hour|month|year))\b/g, "TIME"],
  [/\bAs of now\b/g, "As of TIME"],
  [/\b\d+ (?:d|h|min|s)(?: \d+ (?:h|min|s))?\b/g, "TIME"],
  // These depend on the day of the month.
  [/€[\d,]+(?:\.\d+)?(?= (?:so far|by the end of the month|on average))/g, "AMOUNT"],
  // Whether the connection for events is open by then.
  [/ · live\b/g, ""],
];

export function masked(tree: string): string {
  return MASKS.reduce((text, [pattern, mask]) => text.replace(pattern, mask), tree);
}

/** How long a page may take to become the reviewed one; where the file is written, to become one that stays. */
const SETTLE_MS = process.env["INSTA_UPDATE"] ? 15_000 : 60_000;

/** Compares what is at the selector with its reviewed file below `snapshots`. A page that has its data may still draw what follows from it. */
export async function compareTree(page: Page, selector: string, name: string): Promise<void> {
  const file = new URL(`snapshots/${name}.yaml`, import.meta.url);
  const reviewed = existsSync(file) ? readFileSync(file, "utf8") : "";
  const read = async () => `${masked(await page.locator(selector).first().ariaSnapshot())}\n`;
  const deadline = Date.now() + SETTLE_MS;
  let tree = await read();
  while (tree !== reviewed && Date.now() < deadline) {
    await page.waitForTimeout(200);
    tree = await read();
  }
  await expect.soft(tree).toMatchFileSnapshot(`snapshots/${name}.yaml`);
}
