// Drives a real browser: executes the commands of a test, a line of JSON each, and responds with a line: `{"done": …}` or `{"failed": "…"}`.
//   node driver.mjs FOLDER-WITH-NODE_MODULES CHROMIUM [FLAG...]
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [installed, executablePath, ...args] = process.argv.slice(2);
const { chromium } = createRequire(`${installed}/`)("playwright-core");
// Longer than a busy machine takes for a page, and shorter than the test waits for an answer.
const WITHIN = 60_000;

// The test's authority signs no other host; the requests of the page are logged.
const browser = await chromium.launch({ executablePath, timeout: 100_000, args: ["--no-sandbox", "--disable-quic", ...args] });

/** What pages should not have done: complaints of the browser, dialogs, windows; the hosts of their requests; and all errors and warnings, refused answers too. */
const seen = { complaints: [], dialogs: [], windows: 0, asked: [], messages: [] };

/** The profiles with their tabs, by name. A profile has cookies and storage of its own. */
const profiles = new Map();
/** Windows that a page has opened, until a command names them. */
let popups = [];
let context;
let page;

async function newProfile() {
  const made = await browser.newContext({ ignoreHTTPSErrors: true, viewport: { width: 1000, height: 600 } });
  made.on("request", (request) => seen.asked.push(request.url()));
  return { context: made, tabs: new Map() };
}

async function newTab(profile) {
  const tab = await profile.context.newPage();
  watch(tab);
  // Only later ones were opened by a page.
  tab.on("popup", (opened) => {
    seen.windows += 1;
    popups.push(opened);
    watch(opened);
  });
  return tab;
}

/** Goes on in this tab of this profile; either is made where it is not there. */
async function goTo({ profile: name = "main", tab = "main" }) {
  if (!profiles.has(name)) profiles.set(name, await newProfile());
  const profile = profiles.get(name);
  if (!profile.tabs.has(tab)) profile.tabs.set(tab, await newTab(profile));
  ({ context } = profile);
  page = profile.tabs.get(tab);
  await page.bringToFront();
  return null;
}

/** The window that a page has opened last. */
async function opened() {
  for (let waited = 0; popups.length === 0 && waited < WITHIN; waited += 50) await new Promise((done) => setTimeout(done, 50));
  if (popups.length === 0) throw new Error("no window was opened");
  return popups.at(-1);
}

const ACTS = {
  goTo,
  // The text of the last window's page; null once it is closed.
  popup: async () => {
    const window = await opened();
    return window.isClosed() ? null : window.locator("body").innerText().catch(() => null);
  },
  doubleClick: ({ at }) => page.dblclick(at),
  back: () => page.goBack().then(() => null),
  cookies: () => context.cookies(),
  open: ({ url }) => page.goto(url).then((answer) => answer.status()),
  reload: () => page.reload().then(() => null),
  url: () => page.url(),
  title: () => page.title(),
  fill: ({ at, text }) => page.fill(at, text),
  choose: ({ at, option }) => page.selectOption(at, { label: option }),
  click: ({ at, position }) => page.click(at, { position }),
  type: ({ text }) => page.keyboard.type(text),
  press: ({ key }) => page.keyboard.press(key),
  resize: ({ width, height }) => page.setViewportSize({ width, height }),
  dark: ({ is }) => page.emulateMedia({ colorScheme: is ? "dark" : "light" }),
  // The visible text of the element, or nothing.
  shown: async ({ at }) => {
    const element = page.locator(at).first();
    // It may go away in between, or the page may be too busy to tell: then it is looked at again.
    for (let looks = 0; looks < 20 && (await element.isVisible()); looks += 1) {
      const text = await element.innerText({ timeout: 2_000 }).catch(() => null);
      if (text !== null) return text;
    }
    return null;
  },
  // The rows of the terminal, as they are drawn.
  screen: () => page.locator(".xterm-rows > div").allTextContents(),
  markup: ({ at }) => page.innerHTML(at),
  // A script that runs in each document before its own.
  beforeEach: ({ script }) => context.addInitScript(`(${script})()`).then(() => null),
  // As many times slower than this machine is.
  slowDown: ({ times }) => devTools().then((tools) => tools.send("Emulation.setCPUThrottlingRate", { rate: times })).then(() => null),
  // The bytes of the page's objects after a collection.
  heap: () =>
    devTools().then(async (tools) => {
      await tools.send("HeapProfiler.collectGarbage");
      return (await tools.send("Runtime.getHeapUsage")).usedSize;
    }),
  run: ({ script, given }) => page.evaluate(`(${script})(${JSON.stringify(given)})`),
  seen: () => seen,
};

/** The protocol of Chromium's developer tools for this tab. */
async function devTools() {
  page.devTools ??= await context.newCDPSession(page);
  return page.devTools;
}

function watch(tab) {
  tab.setDefaultTimeout(WITHIN);
  tab.on("pageerror", (error) => seen.complaints.push(String(error)));
  tab.on("console", (line) => {
    if (/Content Security|TrustedHTML|TrustedScript/.test(line.text())) seen.complaints.push(line.text());
    if (["error", "warning"].includes(line.type())) seen.messages.push(`${tab.url()}: ${line.text()}`);
  });
  tab.on("response", (answer) => answer.status() >= 500 && seen.messages.push(`${answer.status()}: ${answer.url()}`));
  tab.on("dialog", (dialog) => {
    seen.dialogs.push(dialog.message());
    dialog.dismiss();
  });
  // The page's connections, which a failed test prints.
  tab.on("websocket", (socket) => {
    seen.asked.push(socket.url());
    const log = (...what) => console.error(new Date().toISOString(), ...what);
    log("connects", socket.url());
    socket.on("framereceived", ({ payload }) => log("<", payload.toString()));
    socket.on("framesent", ({ payload }) => log(">", payload.toString()));
    socket.on("close", () => log("is closed"));
  });
}

await goTo({});

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
