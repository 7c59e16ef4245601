// The page that plays a recording back: who is asked for, what there is of it, and asciinema's player.

import { bearer, logOut, reading } from "./api.js";
import { onlyShows } from "./markup.js";
import { ofDuration } from "./messages.js";

const at = (id) => document.getElementById(id);
const session = location.pathname.split("/").at(-1);
const ask = reading(session, bearer.token);

// The player makes its buttons out of markup of its own, and nothing of a recording ever is markup: what is not of the player is refused.
window.trustedTypes?.createPolicy("default", { createHTML: (markup) => (onlyShows(markup) ? markup : null) });

const only = (shown) => ["sign-in", "about", "player"].forEach((id) => (at(id).hidden = id !== shown));

function say(words, state = "connected") {
  at("state").dataset.state = state;
  at("state").textContent = words;
}

function judge(verdict) {
  if (verdict.kind !== "sign-in") {
    say(verdict.why ?? "The recording cannot be played back.", "closed");
    return;
  }
  bearer.give(null);
  say(verdict.why, "signed-out");
  only("sign-in");
  at("forget").hidden = true;
  at("log-in").focus();
}

async function look() {
  say("Looking …", "connecting");
  at("forget").hidden = false;
  try {
    const found = await (await ask("")).json();
    const missing = found.lost_bytes > 0 ? `${found.lost_bytes} bytes could not be recorded` : null;
    const facts = {
      "session": found.id,
      "user": found.user_id,
      "allocation": found.allocation_id,
      "node": found.node_id,
      "began": new Date(found.created_at).toLocaleString(),
      "length": ofDuration(found.duration_ms),
      "missing": missing,
      "complete": found.complete ? "yes" : "not yet: the node has more of it, or the session goes on",
    };
    at("facts").replaceChildren();
    for (const [name, value] of Object.entries(facts).filter(([, value]) => value !== null)) {
      at("facts").append(Object.assign(document.createElement("dt"), { textContent: name }));
      at("facts").append(Object.assign(document.createElement("dd"), { textContent: value }));
    }
    say("");
    only("about");
  } catch (verdict) {
    judge(verdict);
  }
}

async function play() {
  at("play").disabled = true;
  say("Fetching the recording …", "connecting");
  try {
    const data = await (await ask("/asciicast")).text();
    only("player");
    const shown = window.AsciinemaPlayer.create({ data }, at("player"), {
      fit: "both",
      controls: true,
      idleTimeLimit: 5,
      terminalFontFamily: "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
    });
    shown.addEventListener("ended", () => say("The end."));
    say("Pauses of more than 5 s are cut short.");
    await shown.play();
  } catch (verdict) {
    judge(verdict);
  }
  at("play").disabled = false;
}

at("session").textContent = session.slice(0, 8);
at("session").title = `session ${session}`;
document.title = `Recording ${session.slice(0, 8)} · gpuaas`;
document.title = `Recording ${session.slice(0, 8)}`;
at("log-in").href = `/console/login?${new URLSearchParams({ return_to: location.pathname })}`;
at("play").addEventListener("click", play);
at("forget").addEventListener("click", () => {
  const isConsoleLogin = bearer.token() === null;
  sessionStorage.clear();
  const leave = (url) => (url === null ? location.reload() : location.assign(url));
  isConsoleLogin ? logOut().then(leave, () => leave(null)) : leave(null);
});
at("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  bearer.give(at("token").value.trim());
  at("token").value = "";
  look();
});

// With the login to the web console, if there is one; else the page asks who it is.
look();
