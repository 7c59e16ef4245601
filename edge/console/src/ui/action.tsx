// Actions: a button that opens a dialog. The dialog says the consequences first, takes what is needed, and sends one request.
import { useContext, useLayoutEffect, useRef, type ReactNode } from "react";
import type { ApiFailure } from "../api/failure.ts";
import { useMay, ROLE_FOR, type Permission } from "../session/me.ts";
import { focusPage } from "./focus.ts";
import { OpenedAction } from "./opened-action.tsx";
import { usePageTitle } from "./page-title.ts";
import type { Values } from "./use-draft.ts";

/** One field of a form, as data. */
export interface FieldSpec {
  name: string;
  label: string;
  /** The path in the request by which a refusal names the field, where that is not its name. */
  sentAs?: string;
  /** `hidden`: what the page showed when the form opened. */
  kind?: "text" | "area" | "number" | "select" | "checkbox" | "hidden";
  required?: boolean;
  help?: ReactNode;
  initial?: string;
  maxLength?: number;
  min?: number;
  max?: number;
  pattern?: string;
  options?: readonly { value: string; label: string }[];
}

/** Why it is done; recorded in the audit log. */
export const REASON: FieldSpec = {
  name: "reason",
  label: "Reason",
  required: true,
  maxLength: 500,
  help: "Recorded in the audit log. No keys or passwords.",
};

export interface ActionSpec<R> {
  /** Unique in the console: what was typed is stored under it. */
  id: string;
  label: string;
  title: string;
  danger?: boolean;
  /** What the page is for. */
  primary?: boolean;
  /** What follows from it; where it depends on what is chosen, of the values. */
  consequences: ReactNode | ((values: Values) => ReactNode);
  fields?: readonly FieldSpec[];
  /** The same by the command line. */
  command: (values: Values) => string;
  send: (values: Values, key: string) => Promise<R>;
  /** What a refusal says about these values, and the values with which the form may be sent all the same; null where it says nothing. */
  conflict?: (failure: ApiFailure, values: Values) => { note: ReactNode; label: string; values: Values } | null;
  /** Which queries are read again afterwards, by the first part of their key. */
  refreshes: readonly string[];
  /** What is shown after it is done, such as a secret that is shown once; without it the dialog closes. */
  result?: (result: R) => ReactNode;
  done?: (result: R) => void;
}

/** The button of a dialog; nothing where the permission is missing. */
export function Action<R>({ needs, spec, quiet = false }: { needs?: Permission; spec: ActionSpec<R>; quiet?: boolean }) {
  const { open, markShown, markGone } = useContext(OpenedAction);
  const may = useMay();
  const isOffered = !needs || may(needs);
  const { id } = spec;
  // The open form is compared with what the page shows at each moment.
  useLayoutEffect(() => {
    if (isOffered) markShown(spec as ActionSpec<unknown>);
  });
  useLayoutEffect(() => (isOffered ? () => markGone(id) : undefined), [isOffered, id, markGone]);
  const button = useRef<HTMLButtonElement>(null);
  // What it offered is done, or can be done no more: it is taken away while it has the focus.
  useLayoutEffect(() => {
    if (!isOffered) return undefined;
    const own = button.current;
    return () => {
      if (own !== null && document.activeElement === own) queueMicrotask(() => own.isConnected || focusPage());
    };
  }, [isOffered]);
  if (!isOffered) return null;
  return (
    <button
      ref={button}
      type="button"
      className={quiet ? "quiet" : spec.danger ? "danger" : spec.primary ? "primary" : undefined}
      onClick={() => open(spec as ActionSpec<unknown>)}
      aria-haspopup="dialog"
    >
      {spec.label}
    </button>
  );
}

/** In the place of what a page is for, for callers without the permission: the role that gives it. Other actions are not shown to them. */
export function RoleNeeded({ needs, to }: { needs: Permission; to: string }) {
  const may = useMay();
  return may(needs) ? null : (
    <p className="soft">
      To {to} you need the role {ROLE_FOR[needs]}.
    </p>
  );
}

/** A page that the caller may not see, with the role that is needed. */
export function Guard({ needs, children }: { needs: Permission; children: ReactNode }) {
  const may = useMay();
  return may(needs) ? children : <Refused needs={needs} />;
}

function Refused({ needs }: { needs: Permission }) {
  usePageTitle("Another role is needed");
  return (
    <div className="none">
      <p>This page needs the role {ROLE_FOR[needs]}. Ask an administrator for it.</p>
    </div>
  );
}
