// The focus where its element is taken away: without a place it would begin again at the top of the document.

/** Focuses the heading of the page. */
export function focusPage(): void {
  const main = document.querySelector<HTMLElement>("main");
  (main?.querySelector<HTMLElement>("h1") ?? main)?.focus();
}

/** Focuses the heading of the page, where no element has the focus. */
export function keepFocus(): void {
  if (document.activeElement === null || document.activeElement === document.body) focusPage();
}
