//! The browser pages with a terminal on an allocation, and with the playback of a recording.
//!
//! A page has no secret and is the same for all users. The user gives it an access token, which stays in its tab, and it does what any
//! client does: it requests a terminal token and connects to the gateway, or fetches a recording. Its files are built in (`build.rs`); it
//! sends no request to another host.

use std::sync::LazyLock;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue};
use axum::response::Response;
use uuid::Uuid;

use super::browser_page::{PageFiles, SCRIPT, STYLE, page_response};
use crate::http::error::ApiError;
use crate::http::request_body::Path;
use crate::http::websocket::origin_of;
use crate::services::Services;

const TERMINAL: &str = include_str!("../../terminal-page/index.html");
const RECORDING: &str = include_str!("../../terminal-page/recording.html");

/// The assets of the pages: their own files, and xterm.js and asciinema's player from npm.
const FILES: [(&str, &str, &str); 14] = [
    ("main.js", SCRIPT, include_str!("../../terminal-page/main.js")),
    ("screen.js", SCRIPT, include_str!("../../terminal-page/screen.js")),
    ("session.js", SCRIPT, include_str!("../../terminal-page/session.js")),
    ("sessions.js", SCRIPT, include_str!("../../terminal-page/sessions.js")),
    ("api.js", SCRIPT, include_str!("../../terminal-page/api.js")),
    ("messages.js", SCRIPT, include_str!("../../terminal-page/messages.js")),
    ("style.css", STYLE, include_str!("../../terminal-page/style.css")),
    ("xterm.mjs", SCRIPT, include_str!(concat!(env!("OUT_DIR"), "/xterm.mjs"))),
    ("addon-fit.mjs", SCRIPT, include_str!(concat!(env!("OUT_DIR"), "/addon-fit.mjs"))),
    ("xterm.css", STYLE, include_str!(concat!(env!("OUT_DIR"), "/xterm.css"))),
    ("recording.js", SCRIPT, include_str!("../../terminal-page/recording.js")),
    ("markup.js", SCRIPT, include_str!("../../terminal-page/markup.js")),
    ("asciinema-player.min.js", SCRIPT, include_str!(concat!(env!("OUT_DIR"), "/asciinema-player.min.js"))),
    ("asciinema-player.css", STYLE, include_str!(concat!(env!("OUT_DIR"), "/asciinema-player.css"))),
];

static PAGE_FILES: LazyLock<PageFiles> = LazyLock::new(|| PageFiles::built_in(&FILES));

/// The content security policy of a page: it runs this service's scripts, and connects to this service and to the origins in `connects`.
/// xterm.js and the player write colours and sizes into style sheets that they create. `scripts`: further sources of scripts; `markup`:
/// the trusted types that may create markup from text.
fn content_security_policy(connects: &str, scripts: &str, markup: &str) -> Result<HeaderValue, ApiError> {
    let policy = format!(
        "default-src 'none'; script-src 'self'{scripts}; style-src 'self' 'unsafe-inline'; img-src data:; connect-src 'self'{connects}; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types {markup}"
    );
    HeaderValue::from_str(&policy).map_err(|_| ApiError::internal("the address of terminals is no header's text"))
}

/// A page with a terminal on your active allocation.
///
/// It is the same page for everybody: in it the user gives an access token, by which it asks for terminal tokens. Open it at the
/// control plane's public URL.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The page.", content_type = "text/html", body = String)),
)]
pub(super) async fn page(
    State(services): State<Services>,
    Path(_allocation): Path<Uuid>,
) -> Result<Response, ApiError> {
    let gateway = origin_of(&services.addresses.terminal_url);
    Ok(page_response(TERMINAL, content_security_policy(&format!(" {gateway}"), "", "'none'")?))
}

/// A page that plays a recording back.
///
/// It is the same page for everybody: in it the terminal's user, or an administrator, gives an access token, by which it asks for the
/// recording. Open it at the control plane's public URL.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The page.", content_type = "text/html", body = String)),
)]
pub(super) async fn recording(Path(_session): Path<Uuid>) -> Result<Response, ApiError> {
    // The player uses a WebAssembly module, and its buttons are markup, which `recording.js` checks.
    Ok(page_response(RECORDING, content_security_policy("", " 'wasm-unsafe-eval'", "default")?))
}

/// A script or style sheet of the pages with a terminal and with a recording.
#[utoipa::path(
    get,
    path = "/",
    responses(
        (status = 200, description = "The file.", content(
            (String = "text/javascript"),
            (String = "text/css"),
        )),
        (status = 304, description = "The file is the one that `If-None-Match` names."),
    ),
)]
pub(super) async fn asset(Path(name): Path<String>, request_headers: HeaderMap) -> Result<Response, ApiError> {
    PAGE_FILES.response(&name, &request_headers)
}
