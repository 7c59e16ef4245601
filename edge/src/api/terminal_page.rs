//! The browser pages with a terminal on an allocation, and with the playback of a recording.
//!
//! A page has no secret and is the same for all users. The user gives it an access token, which stays in its memory, and it does what any
//! client does: it requests a terminal token and connects to the gateway, or fetches a recording. Its files are built in (`build.rs`); it
//! sends no request to another host.

use std::sync::LazyLock;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use uuid::Uuid;

use super::browser_page::{PAGE_STYLES, PageFiles, SCRIPT, STYLE, page_with_styles};
use crate::app_state::AppState;
use crate::http::error::ApiError;
use crate::http::request_body::Path;
use crate::http::websocket::origin_of;

const TERMINAL: &str = include_str!("../../terminal-page/index.html");
const RECORDING: &str = include_str!("../../terminal-page/recording.html");

/// The assets of the pages: their own files, and xterm.js and asciinema's player from npm, which a build without the console has not.
const FILES: &[(&str, &str, &str)] = &[
    ("page-styles.js", SCRIPT, PAGE_STYLES),
    ("main.js", SCRIPT, include_str!("../../terminal-page/main.js")),
    ("screen.js", SCRIPT, include_str!("../../terminal-page/screen.js")),
    ("session.js", SCRIPT, include_str!("../../terminal-page/session.js")),
    ("sessions.js", SCRIPT, include_str!("../../terminal-page/sessions.js")),
    ("api.js", SCRIPT, include_str!("../../terminal-page/api.js")),
    ("messages.js", SCRIPT, include_str!("../../terminal-page/messages.js")),
    ("style.css", STYLE, include_str!("../../terminal-page/style.css")),
    #[cfg(feature = "console")]
    ("xterm.mjs", SCRIPT, include_str!(concat!(env!("OUT_DIR"), "/xterm.mjs"))),
    #[cfg(feature = "console")]
    ("addon-fit.mjs", SCRIPT, include_str!(concat!(env!("OUT_DIR"), "/addon-fit.mjs"))),
    #[cfg(feature = "console")]
    ("xterm.css", STYLE, include_str!(concat!(env!("OUT_DIR"), "/xterm.css"))),
    ("recording.js", SCRIPT, include_str!("../../terminal-page/recording.js")),
    ("markup.js", SCRIPT, include_str!("../../terminal-page/markup.js")),
    #[cfg(feature = "console")]
    ("asciinema-player.min.js", SCRIPT, include_str!(concat!(env!("OUT_DIR"), "/asciinema-player.min.js"))),
    #[cfg(feature = "console")]
    ("asciinema-player.css", STYLE, include_str!(concat!(env!("OUT_DIR"), "/asciinema-player.css"))),
];

static PAGE_FILES: LazyLock<PageFiles> = LazyLock::new(|| PageFiles::built_in(FILES));

/// The content security policy of a page: it runs this service's scripts, and connects to this service and to the origins in `connects`.
/// xterm.js and the player write colours and sizes into style sheets that they create, which have the nonce. `scripts`: further sources of
/// scripts; `markup`: the trusted types that may create markup from text.
fn content_security_policy(connects: &str, scripts: &str, markup: &str) -> String {
    format!(
        "default-src 'none'; script-src 'self'{scripts}; style-src 'self' 'nonce-{{{{nonce}}}}'; img-src data:; connect-src 'self'{connects}; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types {markup}"
    )
}

/// A page without the files from npm would be blank.
fn require_npm_files() -> Result<(), ApiError> {
    if cfg!(feature = "console") {
        Ok(())
    } else {
        Err(ApiError::not_found("page: this build has no pages for browsers, use gpuctl"))
    }
}

/// A page with a terminal on your active allocation.
///
/// It is the same page for everybody: in it the user gives an access token, by which it asks for terminal tokens. Open it at the
/// control plane's public URL.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The page.", content_type = "text/html", body = String)),
    extensions(
        ("x-without-gpuctl" = json!("a page")),
        ("x-without-console" = json!("a document of its own; the allocation's page opens it")),
    ),
)]
pub(super) async fn page(State(app): State<AppState>, Path(_allocation): Path<Uuid>) -> Result<Response, ApiError> {
    require_npm_files()?;
    let gateway = origin_of(&app.addresses.terminal_url);
    page_with_styles(TERMINAL, &content_security_policy(&format!(" {gateway}"), "", "'none'"))
}

/// A page that plays a recording back.
///
/// It is the same page for everybody: in it the terminal's user, or an administrator, gives an access token, by which it asks for the
/// recording. Open it at the control plane's public URL.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The page.", content_type = "text/html", body = String)),
    extensions(
        ("x-without-gpuctl" = json!("a page")),
        ("x-without-console" = json!("a document of its own; lists of recordings open it")),
    ),
)]
pub(super) async fn recording(Path(_session): Path<Uuid>) -> Result<Response, ApiError> {
    require_npm_files()?;
    // The player uses a WebAssembly module, and its buttons are markup, which `recording.js` checks.
    page_with_styles(RECORDING, &content_security_policy("", " 'wasm-unsafe-eval'", "default"))
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
    extensions(
        ("x-without-gpuctl" = json!("a part of a page")),
        ("x-without-console" = json!("a part of a document")),
    ),
)]
pub(super) async fn asset(Path(name): Path<String>, request_headers: HeaderMap) -> Result<Response, ApiError> {
    PAGE_FILES.response(&name, &request_headers)
}
