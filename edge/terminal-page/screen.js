// The screen: xterm.js, and what it may not do. Whatever a program writes is drawn and nothing else: it sets no title, opens no link,
// reads no clipboard.

import { FitAddon } from "./addon-fit.mjs";
import { Terminal } from "./xterm.mjs";

const LIGHT = {
  background: "#ffffff", foreground: "#1b2330", cursor: "#0b5cad", cursorAccent: "#ffffff",
  selectionBackground: "#b9d8f7", black: "#1b2330", brightBlack: "#56606f", red: "#b42318", brightRed: "#d92d20",
  green: "#1a7f4b", brightGreen: "#16955a", yellow: "#8a5b00", brightYellow: "#9a6700", blue: "#0b5cad",
  brightBlue: "#1a73d1", magenta: "#8a2f9e", brightMagenta: "#a53cbd", cyan: "#0d7480", brightCyan: "#118a98",
  white: "#6b7583", brightWhite: "#3d4653",
};
const DARK = {
  background: "#14171c", foreground: "#e4e8ee", cursor: "#78b7f5", cursorAccent: "#14171c",
  selectionBackground: "#2d4a68", black: "#343b46", brightBlack: "#7d8796", red: "#ff8a7a", brightRed: "#ffaea3",
  green: "#4cc38a", brightGreen: "#7adba9", yellow: "#e5b454", brightYellow: "#f2cc80", blue: "#78b7f5",
  brightBlue: "#a3cffa", magenta: "#d59be6", brightMagenta: "#e5bdf0", cyan: "#5cc8d4", brightCyan: "#8bdbe4",
  white: "#c9d0da", brightWhite: "#ffffff",
};
/** How long a window that is being drawn larger is let be. */
const SETTLES_IN = 100;

export class Screen {
  #terminal;
  #fit = new FitAddon();
  #settles = null;

  /** @param {HTMLElement} element @param {{type: (bytes: Uint8Array) => void, resized: () => void, leave: () => void}} heard */
  constructor(element, heard) {
    this.element = element;
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const still = matchMedia("(prefers-reduced-motion: reduce)");
    this.#terminal = new Terminal({
      fontFamily: "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
      fontSize: 14,
      scrollback: 10_000,
      cursorBlink: !still.matches,
      disableStdin: true,
      theme: dark.matches ? DARK : LIGHT,
      // A program's hyperlinks (OSC 8) show one text and lead elsewhere.
      linkHandler: { activate() {} },
    });
    dark.addEventListener("change", () => (this.#terminal.options.theme = dark.matches ? DARK : LIGHT));
    this.#terminal.loadAddon(this.#fit);
    const text = new TextEncoder();
    this.#terminal.onData((data) => heard.type(text.encode(data)));
    this.#terminal.onBinary((data) => heard.type(Uint8Array.from(data, (sign) => sign.charCodeAt(0))));
    this.#terminal.onResize(() => heard.resized());
    this.#terminal.attachCustomKeyEventHandler((event) => {
      const leaves = event.key === "F6" && event.ctrlKey;
      if (leaves && event.type === "keydown") {
        event.preventDefault();
        heard.leave();
      }
      return !leaves;
    });
  }

  /** Shows it, at the size that there is. */
  open() {
    if (!this.#terminal.element) {
      this.#terminal.open(this.element);
      new ResizeObserver(() => this.#settle()).observe(this.element);
    }
    this.#fit.fit();
  }

  #settle() {
    clearTimeout(this.#settles);
    this.#settles = setTimeout(() => this.#fit.fit(), SETTLES_IN);
  }

  write(bytes, drawn) {
    this.#terminal.write(bytes, drawn);
  }

  /** A line of this page's own, whatever the program was about to draw. */
  notice(text) {
    this.#terminal.write(`\x1b[0m\r\n\x1b[2m[${text}]\x1b[0m\r\n`);
  }

  clear() {
    this.#terminal.reset();
  }

  size() {
    return { columns: this.#terminal.cols, rows: this.#terminal.rows };
  }

  takesInput(yes) {
    this.#terminal.options.disableStdin = !yes;
    if (yes) {
      this.#terminal.focus();
    }
  }

  readAloud(yes) {
    this.#terminal.options.screenReaderMode = yes;
  }
}
