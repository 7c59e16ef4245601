// Compresses what was built, and fails where it is larger than its budget.
//   node scripts/compress-assets.mjs [FOLDER]
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { brotliCompressSync, constants } from "node:zlib";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

/** In bytes, compressed by brotli. */
export const BUDGET = { firstView: 170_000, everything: 700_000 };

/** The assets that the first view loads: those of the entry, of its page, and all that these import. */
export function firstView(manifest, pages) {
  const files = new Set();
  const visit = (name) => {
    const chunk = manifest[name];
    if (!chunk || files.has(chunk.file)) return;
    files.add(chunk.file);
    for (const style of chunk.css ?? []) files.add(style);
    for (const imported of chunk.imports ?? []) visit(imported);
  };
  ["index.html", ...pages].forEach(visit);
  return [...files];
}

/** The sentences about what is over the budget; none where all is within it. */
export function overBudget(sizes, manifest, pages) {
  const sum = (names) => names.reduce((total, name) => total + (sizes.get(name) ?? 0), 0);
  const found = { firstView: sum(firstView(manifest, pages)), everything: sum([...sizes.keys()]) };
  const complaints = Object.entries(BUDGET)
    .filter(([name, most]) => found[name] > most)
    .map(([name, most]) => `${name} has ${found[name]} bytes, at most ${most} are allowed`);
  return { found, complaints };
}

function main(folder) {
  const manifest = JSON.parse(readFileSync(join(folder, ".vite/manifest.json"), "utf8"));
  const sizes = new Map();
  for (const entry of readdirSync(folder, { recursive: true, withFileTypes: true })) {
    const path = join(entry.parentPath, entry.name);
    if (!entry.isFile() || path.includes(".vite") || path.endsWith(".br")) continue;
    const text = readFileSync(path);
    const compressed = brotliCompressSync(text, { params: { [constants.BROTLI_PARAM_QUALITY]: 11, [constants.BROTLI_PARAM_SIZE_HINT]: text.length } });
    writeFileSync(`${path}.br`, compressed);
    sizes.set(path.slice(folder.length + 1), compressed.length);
  }
  const { found, complaints } = overBudget(sizes, manifest, ["src/pages/overview.tsx"]);
  console.log(`console: first view ${found.firstView} bytes, everything ${found.everything} bytes, compressed`);
  if (complaints.length > 0) {
    console.error(`the console is over its budget: ${complaints.join("; ")}`);
    process.exit(1);
  }
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? "").href) main(resolve(process.argv[2] ?? "dist"));
