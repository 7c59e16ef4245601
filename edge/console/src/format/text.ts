// Names, numbers and command lines as text.

const NUMBER = new Intl.NumberFormat();

export function count(value: number): string {
  return NUMBER.format(value);
}

/** A size in MiB, in the unit that reads best. */
export function mebibytes(value: number): string {
  return value >= 1024 ? `${NUMBER.format(Math.round(value / 102.4) / 10)} GiB` : `${NUMBER.format(value)} MiB`;
}

/** `release_failed` as a person reads it. */
export function readable(code: string): string {
  return code.replace(/[_.-]+/g, " ");
}

/** The start of a UUID, which is enough to tell rows apart. */
export function shortId(id: string): string {
  return id.length > 13 ? `${id.slice(0, 4)}…${id.slice(-8)}` : id;
}

/** An argument as a POSIX shell takes it. */
export function shellQuoted(argument: string): string {
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(argument) ? argument : `'${argument.replaceAll("'", "'\\''")}'`;
}

/** What was typed for an argument without an option. */
type Typed = readonly [typed: string];
type Option = readonly [option: string, value: string | null | undefined];

/** The command line of gpuctl that does the same; options without a value are left out. */
export function gpuctl(...parts: (string | Typed | Option)[]): string {
  const line = ["gpuctl"];
  // What follows `--` is read as no option, whatever it begins with.
  const last: string[] = [];
  for (const part of parts) {
    if (typeof part === "string") line.push(shellQuoted(part));
    else if (part.length === 1) (last.length > 0 || part[0].startsWith("-") ? last : line).push(shellQuoted(part[0]));
    // A value that begins with a dash would be read as an option.
    else if (part[1]?.startsWith("-")) line.push(`${part[0]}=${shellQuoted(part[1])}`);
    else if (part[1]) line.push(part[0], shellQuoted(part[1]));
  }
  return [...line, ...(last.length > 0 ? ["--", ...last] : [])].join(" ");
}
