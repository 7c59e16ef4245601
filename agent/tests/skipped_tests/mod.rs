//! Tests that this machine cannot run: they end early and are reported, so that a passed suite does not claim more than it showed.
//!
//! `deploy/test` names a file in `GPUAAS_NOT_RUN` and prints what was written to it.

use std::io::Write as _;

/// Reports that the calling test is skipped here. `reason` says what the machine lacks.
#[allow(unreachable_pub, reason = "the harness of `tests` exports it, the agent's own tests do not")]
pub fn report_skipped(reason: &str) {
    let thread = std::thread::current();
    let name = thread.name().filter(|name| *name != "main").map(str::to_owned);
    // A test on the main thread was named on the command line.
    let name = name.or_else(|| std::env::args().skip_while(|argument| argument != "--exact").nth(1));
    let line = format!("{} {}: {reason}\n", env!("CARGO_PKG_NAME"), name.as_deref().unwrap_or("(unnamed test)"));
    eprint!("not run: {line}");
    let Some(path) = std::env::var_os("GPUAAS_NOT_RUN") else { return };
    // One write of one line, since many tests append at once.
    let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
    let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
    assert!(written.is_ok(), "{} cannot be written: {written:?}", path.display());
}
