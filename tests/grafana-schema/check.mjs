// Compiles dashboards against Grafana's own types: unknown fields, values of another type and options that a panel does not have are errors.
//   node check.mjs FOLDER-WITH-NODE_MODULES BOARD.json...
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { basename, join } from "node:path";

const [installed, ...boards] = process.argv.slice(2);
const ts = createRequire(`${installed}/`)("typescript");

/** Where the types of each kind of panel are, below `raw/composable`. */
const PANELS = { timeseries: "timeseries/panelcfg/x/TimeSeriesPanelCfg", stat: "stat/panelcfg/x/StatPanelCfg" };

/** A value of JSON has the text of an enumeration's member, not the member. An option that a panel leaves out has Grafana's default. */
const JSON_TYPES = `
type Json<T> = T extends string ? \`\${T}\` : T extends readonly (infer U)[] ? Json<U>[] : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
type Options<T> = T extends string ? \`\${T}\` : T extends readonly (infer U)[] ? Options<U>[] : T extends object ? { [K in keyof T]?: Options<T[K]> } : T;
`;

function sourceOf(board) {
  const dashboard = JSON.parse(readFileSync(board, "utf8"));
  const lines = ['import type { Dashboard } from "@grafana/schema";'];
  for (const [type, path] of Object.entries(PANELS)) lines.push(`import type * as ${type} from "@grafana/schema/dist/esm/raw/composable/${path}_types.gen";`);
  lines.push(JSON_TYPES, `export const board: Json<Dashboard> = ${JSON.stringify(dashboard, null, 1)};`);
  for (const panel of dashboard.panels.filter(({ type }) => type !== "row")) {
    lines.push(`// ${JSON.stringify(panel.title)}`, `export const options_${panel.id}: Options<${panel.type}.Options> = ${JSON.stringify(panel.options ?? {})};`);
    const custom = panel.fieldConfig?.defaults?.custom;
    if (custom) lines.push(`export const custom_${panel.id}: Options<${panel.type}.FieldConfig> = ${JSON.stringify(custom)};`);
  }
  return lines.join("\n");
}

const sources = new Map(boards.map((board) => [join(installed, `${basename(board)}.ts`), sourceOf(board)]));
const options = { strict: true, noEmit: true, module: ts.ModuleKind.ESNext, moduleResolution: ts.ModuleResolutionKind.Bundler, target: ts.ScriptTarget.ESNext, types: [], skipLibCheck: true };
const host = ts.createCompilerHost(options);
const { fileExists, getSourceFile } = host;
host.fileExists = (name) => sources.has(name) || fileExists(name);
host.getSourceFile = (name, target) => (sources.has(name) ? ts.createSourceFile(name, sources.get(name), target) : getSourceFile(name, target));
const errors = ts.getPreEmitDiagnostics(ts.createProgram([...sources.keys()], options, host));
for (const { file, start, messageText } of errors) {
  const text = ts.flattenDiagnosticMessageText(messageText, "\n");
  if (!file) console.log(text);
  else {
    const { line } = file.getLineAndCharacterOfPosition(start);
    console.log(`${basename(file.fileName)}: ${file.text.split("\n")[line].trim().slice(0, 200)}\n  ${text}`);
  }
}
process.exitCode = errors.length > 0 ? 1 : 0;
