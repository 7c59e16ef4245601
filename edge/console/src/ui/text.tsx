// Texts: those of other people, ids, labels, paths of devices, and texts that are copied as a whole.
import { useState } from "react";
import { shortId } from "../format/text.ts";

/** Text of other people: names and messages, in the direction of their own script. */
export function Plain({ children }: { children: string | null | undefined }) {
  return children ? <bdi className="plain">{children}</bdi> : <span className="soft">–</span>;
}

export function Id({ children }: { children: string }) {
  return (
    <code title={children} aria-label={children}>
      {shortId(children)}
    </code>
  );
}

/** Name and value of each label. */
export function Labels({ of }: { of: Record<string, string> }) {
  const all = Object.entries(of);
  if (all.length === 0) return <span className="soft">–</span>;
  return (
    <ul className="labels">
      {all.map(([key, value]) => (
        <li key={key}>
          <bdi>{value === "" ? key : `${key}=${value}`}</bdi>
        </li>
      ))}
    </ul>
  );
}

/** Paths below `/dev`; the service bounds them to 32 of 128 bytes. */
export function DevicePaths({ of }: { of: readonly string[] }) {
  return (
    <ul className="labels" aria-label="Devices">
      {of.map((path) => (
        <li key={path}>
          <code>{path}</code>
        </li>
      ))}
    </ul>
  );
}

/** A text that is copied as a whole: a command, a fingerprint. */
export function Copyable({ text, label }: { text: string; label: string }) {
  // Of a text that has changed since, nothing is copied.
  const [last, setLast] = useState<{ text: string; isCopied: boolean } | null>(null);
  const copied = last?.text !== text ? "no" : last.isCopied ? "yes" : "refused";
  const copy = async () => {
    const isCopied = await navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
    setLast({ text, isCopied });
  };
  return (
    <span className="copyable">
      <code tabIndex={0} role="group" aria-label={label}>
        {text}
      </code>
      <button type="button" className="quiet" onClick={() => void copy()} aria-label={`Copy ${label}`}>
        {copied === "yes" ? "Copied" : "Copy"}
      </button>
      <span role="status" className={copied === "refused" ? "soft" : "hidden"}>
        {copied === "yes" ? `${label} is copied.` : copied === "refused" ? "The browser refuses to copy. Select the text." : ""}
      </span>
    </span>
  );
}

/** The command line that does the same. */
export function CommandLine({ line }: { line: string }) {
  return (
    <div className="command-line">
      <span className="soft">The same on the command line</span>
      <Copyable text={line} label="command" />
    </div>
  );
}
