import assert from "node:assert/strict";
import { test } from "node:test";

import { onlyShows } from "./markup.js";

test("what the player builds its surface of only shows", () => {
  for (const markup of [
    "",
    '<div class="ap-wrapper" tabindex="-1"><div></div></div>',
    '<button class="ap-button ap-playback-button" type="button" aria-label="Mute / unmute"></button>',
    "<li><kbd>←</kbd> / <kbd>→</kbd> - rewind / fast-forward by 5 seconds</li>",
    '<svg version="1.1" viewBox="0 0 12 12" class="ap-icon" aria-hidden="true"><path d="M1,0 L4,0 L4,12 Z"></path></svg>',
    '<path fill-rule="evenodd" d="M0,0 L1,0 Z" fill="currentColor"/>',
    '<path d="M1,1 L1,0 Z" fill="none" stroke="currentColor" stroke-width="0.02" stroke-linejoin="miter"/>',
    '<polygon points="1000.0 500.0, 250.0 66.9" mask="url(#small-triangle-mask)" fill="white"></polygon>',
  ]) {
    assert.ok(onlyShows(markup), markup);
  }
});

test("what could act, or fetch, does not, however it is written", () => {
  for (const markup of [
    "<img src=x onerror=alert(1)>",
    "<img/onerror=alert(1) src=x>",
    "<svg/onload=alert(1)>",
    '<div\tonclick="x"></div>',
    '<div class="a"onclick="x"></div>',
    '<div class="a" onclick="x"></div>',
    '<div style="background: url(https://evil.example/)"></div>',
    '<rect fill="url(https://evil.example/)"></rect>',
    '<rect fill="URL(https://evil.example/)"></rect>',
    '<rect fill="&#117;rl(https://evil.example/)"></rect>',
    "<script>alert(1)</script>",
    "<SCRIPT>alert(1)</SCRIPT>",
    '<a href="javascript:alert(1)">x</a>',
    '<use href="data:image/svg+xml,x"></use>',
    "<iframe></iframe>",
    "<!-- --><b>x</b>",
    "<div",
    "</div onclick=x>",
    "<template><div></div></template>",
  ]) {
    assert.ok(!onlyShows(markup), markup);
  }
});
