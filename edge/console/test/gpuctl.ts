// gpuctl's commands and options, as its own reviewed table has them.
import { readFileSync } from "node:fs";

const TABLE = "../cli/src/snapshots/gpuctl__tests__commands_are_as_reviewed.snap";
const known = readFileSync(TABLE, "utf8")
  .split("\n")
  .filter((line) => line.startsWith("gpuctl "))
  .map((line) => {
    const parts = line.split(" ").slice(1);
    const end = parts.findIndex((part) => !/^[a-z][a-z-]*$/.test(part));
    return { command: parts.slice(0, end < 0 ? undefined : end).join(" "), options: parts.filter((part) => part.startsWith("--")) };
  });

/** Why the line is none of gpuctl's; null where it is. */
export function complaint(line: string): string | null {
  // What follows `--` is no option.
  const words = (line.replace(/'[^']*'/g, "quoted").split(" -- ")[0] ?? "").split(/\s+/).slice(1);
  const matches = known.filter(({ command }) => command !== "" && `${words.join(" ")} `.startsWith(`${command} `));
  // The longest command whose words begin the line.
  const match = matches.sort((a, b) => b.command.length - a.command.length)[0];
  if (!match) return `${line}: gpuctl has no such command`;
  const missing = words.filter((word) => word.startsWith("--")).map((word) => word.split("=")[0] ?? "").filter((option) => !match.options.includes(option));
  return missing.length === 0 ? null : `${line}: gpuctl ${match.command} has no ${missing.join(", ")}`;
}
