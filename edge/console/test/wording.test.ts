// One word for one thing in what people read: deploy/docs/src/glossary.md.
import { readdirSync, readFileSync } from "node:fs";
import { expect, it } from "vitest";

/** The sources of pages that people read: those of the console, of terminals and recordings, and of payments. */
const FOLDERS = ["src", "../terminal-page", "../payment-page"];
const SOURCE = /\.(tsx?|js|html)$/;

it("pages say that one logs in and out", () => {
  const files = FOLDERS.flatMap((folder) => readdirSync(folder, { recursive: true, encoding: "utf8" }).map((name) => `${folder}/${name}`));
  const sources = files.filter((name) => SOURCE.test(name) && !name.includes("node_modules"));
  expect(sources.length).toBeGreaterThan(60);
  const others = sources.filter((name) => /\bsign(s|ed|ing)? (in|out)\b/i.test(readFileSync(name, "utf8")));
  expect(others).toEqual([]);
});

it("sources name the user, the caller or no input, and no indefinite person", () => {
  const sources = readdirSync("src", { recursive: true, encoding: "utf8" }).filter((name) => SOURCE.test(name));
  const others = sources.filter((name) => /\b(nobody|somebody|whoever|anybody)\b/i.test(readFileSync(`src/${name}`, "utf8")));
  expect(others).toEqual([]);
});
