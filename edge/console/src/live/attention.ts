// Whether the user works in this tab. What no message reports is read again while they do; a tab without input is idle, and asks for next to nothing.

/** A tab without a key, a press, a scroll or a movement for so long is idle. */
export const IDLE_AFTER_MS = 120_000;

/** To open the console is an input, too. */
let lastInputAt = performance.now();
const listeners = new Set<() => void>();

/** Whether there was an input a short time ago. */
export function isAttended(): boolean {
  return performance.now() - lastInputAt < IDLE_AFTER_MS;
}

/** Calls `returned` at the first input after the tab was idle. */
export function onReturn(returned: () => void): () => void {
  listeners.add(returned);
  return () => listeners.delete(returned);
}

function input(): void {
  const wasIdle = !isAttended();
  lastInputAt = performance.now();
  if (wasIdle) listeners.forEach((returned) => returned());
}

for (const kind of ["keydown", "pointerdown", "wheel", "touchmove"]) window.addEventListener(kind, input, { capture: true, passive: true });
// A pointer that lies still is reported as moved where the page moves below it.
window.addEventListener("pointermove", ({ movementX, movementY }) => (movementX !== 0 || movementY !== 0) && input(), { capture: true, passive: true });
