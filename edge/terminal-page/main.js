// The page: who is asked for, what is shown, and which button does what.

import { bearer, logOut, minting } from "./api.js";
import { Screen } from "./screen.js";
import { Session } from "./session.js";
import { ofSession, sessionsOf } from "./sessions.js";
import { OFFERS, ofRecording } from "./messages.js";

const at = (id) => document.getElementById(id);
const allocation = location.pathname.split("/").at(-1);

// What this tab remembers: the session, so that a reloaded page continues it. It opens nothing without its user.
const SESSION = `gpuaas.session.${allocation}`;
const READ_ALOUD = "gpuaas.read-aloud";

const remember = (storage, key, value) => (value === null ? storage.removeItem(key) : storage.setItem(key, value));

const screen = new Screen(at("screen"), {
  type: (bytes) => session.type(bytes),
  resized: () => session.resize(),
  leave: () => (at("next").hidden ? at("end") : at("next")).focus(),
});

const session = new Session(
  {
    mint: minting(allocation, bearer.token),
    connect: (url, protocols) => new WebSocket(url, protocols),
    screen,
    tell: show,
    recorded: showRecording,
    keep: (id) => remember(sessionStorage, SESSION, id),
    after: (run, ms) => setTimeout(run, ms),
    cancel: (timer) => clearTimeout(timer),
    now: () => performance.now(),
    chance: Math.random,
  },
  sessionStorage.getItem(SESSION),
);

const open = sessionsOf(allocation, bearer.token);

/** Reads the user's open sessions and lists them. */
async function listSessions() {
  try {
    const sessions = await open.list();
    at("sessions-problem").hidden = true;
    at("sessions-count").textContent = `(${sessions.length})`;
    at("sessions-list").replaceChildren(...sessions.map(row));
  } catch (verdict) {
    sessionsProblem(verdict);
  }
}

function sessionsProblem(verdict) {
  at("sessions-problem").textContent = verdict.why;
  at("sessions-problem").hidden = verdict.why === "";
}

function row(found) {
  const { text, isCurrent } = ofSession(found, session.id, new Date());
  const item = document.createElement("li");
  item.dataset.session = found.id;
  item.append(text);
  if (!isCurrent) {
    item.append(" ", button("Resume", () => {
      screen.clear();
      session.resume(found.id);
    }));
  }
  item.append(" ", button("End", () => open.end(found.id).then(listSessions, sessionsProblem)));
  return item;
}

function button(label, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = label;
  made.addEventListener("click", act);
  return made;
}

/** @param {import("./session.js").State} state */
function show(state) {
  const signedOut = state.name === "signed-out";
  if (state.name === "connected" || state.name === "closed") {
    listSessions();
  }
  at("state").dataset.state = state.name;
  const words = wordsOf(state);
  if (at("state").textContent !== words) {
    at("state").textContent = words;
  }
  // Beside what is read aloud: a screen reader must not announce every second.
  at("countdown").textContent = state.name === "waiting" ? `in ${state.seconds} s` : "";
  at("sign-in").hidden = !signedOut;
  for (const id of ["screen", "hint", "forget", "sessions"]) {
    at(id).hidden = signedOut;
  }
  at("end").hidden = state.name !== "connected";
  if (signedOut) {
    at("recording").hidden = true;
  }
  offer(state);
  screen.takesInput(state.name === "connected");
  if (signedOut) {
    at("log-in").focus();
  }
}

/** A user who is recorded is informed of it. */
function showRecording(mode) {
  const link = at("recording");
  const { short, long } = ofRecording(mode);
  link.hidden = false;
  link.dataset.mode = mode;
  link.textContent = short;
  link.title = long;
  if (mode !== "off") {
    link.href = `/recordings/${session.id}`;
  } else {
    link.removeAttribute("href");
  }
}

function wordsOf(state) {
  switch (state.name) {
    case "connecting":
      return "Connecting …";
    case "connected":
      return "Connected.";
    case "waiting":
      return `${state.why} Reconnecting`;
    default:
      return state.why;
  }
}

/** The one thing that can be done next, if there is one. */
function offer(state) {
  const next = state.name === "waiting" ? "now" : state.name === "closed" ? state.next : null;
  const button = at("next");
  button.hidden = next === null;
  button.textContent = next === null ? "" : OFFERS[next];
  button.dataset.offers = next ?? "";
  if (state.name === "closed" && next !== null) {
    button.focus();
  }
}

function begin() {
  for (const [id, hidden] of [["sign-in", true], ["screen", false], ["hint", false]]) {
    at(id).hidden = hidden;
  }
  screen.open();
  session.open();
}

const ACTS = {
  now: () => session.hurry(),
  take: () => session.open(),
  retry: () => session.open(),
  new: () => {
    screen.clear();
    session.openNew();
  },
};

const short = allocation.slice(0, 8);
at("allocation").textContent = short;
at("allocation").title = `allocation ${allocation}`;
document.title = `Terminal ${short} · gpuaas`;
at("log-in").href = `/console/login?${new URLSearchParams({ return_to: location.pathname })}`;
at("next").addEventListener("click", () => ACTS[at("next").dataset.offers]?.());
at("end").addEventListener("click", () => session.end());
at("forget").addEventListener("click", () => {
  session.leave();
  const isConsoleLogin = bearer.token() === null;
  sessionStorage.clear();
  // Nothing of what was shown is left for who sits here next.
  const leave = (url) => (url === null ? location.reload() : location.assign(url));
  isConsoleLogin ? logOut().then(leave, () => leave(null)) : leave(null);
});
at("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  bearer.give(at("token").value.trim());
  at("token").value = "";
  begin();
});
at("read-aloud").checked = localStorage.getItem(READ_ALOUD) !== null;
at("read-aloud").addEventListener("change", () => {
  remember(localStorage, READ_ALOUD, at("read-aloud").checked ? "yes" : null);
  screen.readAloud(at("read-aloud").checked);
});
screen.readAloud(at("read-aloud").checked);
at("sessions").addEventListener("toggle", () => at("sessions").open && listSessions());
addEventListener("online", () => session.hurry());

// With the login to the web console, if there is one; else the page asks who it is.
begin();
