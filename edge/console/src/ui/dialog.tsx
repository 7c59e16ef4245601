// The frame of every dialog: the keyboard stays in it, Escape closes it, and what is behind it cannot be reached.
import { useLayoutEffect, useRef, type ReactNode } from "react";
import { Dialog, Heading, Modal, ModalOverlay } from "react-aria-components";

interface DialogFrameProps {
  title: string;
  close: () => void;
  /** A click beside the dialog closes it. */
  isDismissable?: boolean;
  /** It stays open for now, because a request is on its way. */
  isBusy?: boolean;
  children: ReactNode;
}

export function DialogFrame({ title, close, isDismissable = false, isBusy = false, children }: DialogFrameProps) {
  useEscapeOutsideOfDialog(isBusy ? () => {} : close);
  return (
    <ModalOverlay className="overlay" isOpen isDismissable={isDismissable} onOpenChange={(open) => !open && close()} isKeyboardDismissDisabled={isBusy}>
      <Modal className="modal">
        <Dialog className="dialog" aria-label={title}>
          <Heading slot="title">{title}</Heading>
          {children}
        </Dialog>
      </Modal>
    </ModalOverlay>
  );
}

/** Escape while the focus is outside the dialog: before its effects have moved the focus, or until the next frame after the focused element was
 * removed. React Aria handles the key inside the dialog alone, and then stops it, so that it does not arrive here. */
function useEscapeOutsideOfDialog(close: () => void): void {
  const latest = useRef(close);
  latest.current = close;
  useLayoutEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if (event.key === "Escape" && !event.isComposing) latest.current();
    };
    document.addEventListener("keydown", pressed);
    return () => document.removeEventListener("keydown", pressed);
  }, []);
}
