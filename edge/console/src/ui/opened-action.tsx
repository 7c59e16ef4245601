// The dialog that is open. It is no part of the row that has its button: a list that is read again may lose the row, and with it what was typed, or a
// secret that is shown once.
import { createContext, Suspense, useEffect, useMemo, useRef, useState, type ReactNode } from "react";
import { useRouterState } from "@tanstack/react-router";
import { useMe } from "../session/me.ts";
import type { ActionSpec } from "./action.tsx";
import { keepFocus } from "./focus.ts";
import { ClosedDialog, lazyPart } from "./lazy-part.tsx";

const Dialog = lazyPart(() => import("./action-dialog.tsx"), ClosedDialog);

type Spec = ActionSpec<unknown>;

/** More than two frames. */
const FOCUS_AFTER_MS = 60;

interface Opened {
  spec: Spec;
  /** Its button is not on the page any more. */
  isGone: boolean;
  /** What the caller might do when it was opened. */
  permissions: string;
}

interface OpenedActionContext {
  open: (spec: Spec) => void;
  /** The button of this action is on the page. */
  markShown: (spec: Spec) => void;
  markGone: (id: string) => void;
}

export const OpenedAction = createContext<OpenedActionContext>({ open: () => {}, markShown: () => {}, markGone: () => {} });

/** Where the actions of a page open their dialogs. */
export function ActionDialogs({ children }: { children: ReactNode }) {
  const [opened, setOpened] = useState<Opened | null>(null);
  const permissions = useMe().permissions.join();
  const path = useRouterState({ select: ({ location }) => location.pathname });
  // The browser's Back leaves the page, and the dialog with it.
  useEffect(() => setOpened(null), [path]);
  // The page names the role that is needed, where it was taken from the caller.
  const isOpen = opened !== null && !(opened.isGone && opened.permissions !== permissions);
  // The dialog gives the focus back to its button, which may be gone, in the next frame.
  const wasOpen = useRef(false);
  useEffect(() => {
    const isClosed = wasOpen.current && !isOpen;
    wasOpen.current = isOpen;
    if (!isClosed) return undefined;
    const timer = setTimeout(keepFocus, FOCUS_AFTER_MS);
    return () => clearTimeout(timer);
  }, [isOpen]);
  const context = useMemo<OpenedActionContext>(
    () => ({
      open: (spec) => setOpened({ spec, isGone: false, permissions }),
      markShown: (spec) => setOpened((before) => (before?.spec.id === spec.id ? { ...before, spec, isGone: false } : before)),
      markGone: (id) => setOpened((before) => (before?.spec.id === id ? { ...before, isGone: true } : before)),
    }),
    [permissions],
  );
  return (
    <OpenedAction value={context}>
      {children}
      {isOpen && (
        <Suspense fallback={null}>
          <Dialog key={opened.spec.id} spec={opened.spec} isGone={opened.isGone} close={() => setOpened(null)} />
        </Suspense>
      )}
    </OpenedAction>
  );
}
