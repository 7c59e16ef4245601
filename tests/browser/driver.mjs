// Drives a real browser: executes the commands of a test, a line of JSON each, and responds with a line: `{"done": …}` or `{"failed": "…"}`.
//   node driver.mjs FOLDER-WITH-NODE_MODULES CHROMIUM [FLAG...]
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [installed, executablePath, ...args] = process.argv.slice(2);
const { chromium } = createRequire(`${installed}/`)("playwright-core");
const WITHIN = 20_000;

// The test's authority signs no other host; the requests of the page are logged.
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-quic", ...args] });
const context = await browser.newContext({ ignoreHTTPSErrors: true, viewport: { width: 1000, height: 600 } });
const page = await context.newPage();
page.setDefaultTimeout(WITHIN);

/** What a page should not have done: complaints of the browser, dialogs, windows; and whom it asked. */
const seen = { complaints: [], dialogs: [], windows: 0, asked: [] };
page.on("pageerror", (error) => seen.complaints.push(String(error)));
page.on("console", (line) => /Content Security|TrustedHTML|TrustedScript/.test(line.text()) && seen.complaints.push(line.text()));
page.on("dialog", (dialog) => {
  seen.dialogs.push(dialog.message());
  dialog.dismiss();
});
context.on("page", () => (seen.windows += 1));
context.on("request", (request) => seen.asked.push(request.url()));
page.on("websocket", (socket) => seen.asked.push(socket.url()));

const ACTS = {
  open: ({ url }) => page.goto(url).then((answer) => answer.status()),
  reload: () => page.reload().then(() => null),
  url: () => page.url(),
  title: () => page.title(),
  fill: ({ at, text }) => page.fill(at, text),
  click: ({ at, position }) => page.click(at, { position }),
  type: ({ text }) => page.keyboard.type(text),
  press: ({ key }) => page.keyboard.press(key),
  resize: ({ width, height }) => page.setViewportSize({ width, height }),
  dark: ({ is }) => page.emulateMedia({ colorScheme: is ? "dark" : "light" }),
  // The visible text of the element, or nothing.
  shown: async ({ at }) => ((await page.isVisible(at)) ? page.innerText(at) : null),
  // The rows of the terminal, as they are drawn.
  screen: () => page.locator(".xterm-rows > div").allTextContents(),
  markup: ({ at }) => page.innerHTML(at),
  run: ({ script, given }) => page.evaluate(`(${script})(${JSON.stringify(given)})`),
  seen: () => seen,
};

// The page's connections, which a failed test prints.
page.on("websocket", (socket) => {
  const log = (...what) => console.error(new Date().toISOString(), ...what);
  log("connects", socket.url());
  socket.on("framereceived", ({ payload }) => log("<", payload.toString()));
  socket.on("framesent", ({ payload }) => log(">", payload.toString()));
  socket.on("close", () => log("is closed"));
});

const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
say({ done: "ready" });
for await (const line of createInterface({ input: process.stdin })) {
  const { act, ...how } = JSON.parse(line);
  try {
    say({ done: (await ACTS[act](how)) ?? null });
  } catch (error) {
    say({ failed: `${act}: ${error.message}` });
  }
}
await browser.close();
