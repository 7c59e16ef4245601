//! Programs of others that look at the service from outside: what deploy/test installs.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tests::world::World;

/// The checkout.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the checkout").to_owned()
}

/// Where deploy/test puts what it installs.
pub(crate) fn tools() -> PathBuf {
    std::env::var_os("GPUAAS_TOOLS_DIR").map_or_else(|| root().join(".dev/tools"), PathBuf::from)
}

/// What deploy/test has put there. There is no test without it.
pub(crate) fn installed(path: &str) -> PathBuf {
    let path = tools().join(path);
    assert!(path.exists(), "{} is missing: `deploy/test --tools` installs it", path.display());
    path
}

/// A Python program of the contract's tools.
pub(crate) fn python_program(name: &str) -> PathBuf {
    installed("contract/bin").join(name)
}

pub(crate) fn chromium() -> &'static Path {
    let found = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"]
        .into_iter()
        .map(Path::new)
        .find(|path| path.is_file());
    found.expect("there is no Chromium: `deploy/test --tools` installs it")
}

/// A headless browser that keeps to this machine and writes down whom it asks.
pub(crate) fn browser() -> Command {
    let mut browser = Command::new(chromium());
    browser.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-quic",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
    ]);
    browser
}

/// Runs it to its end and returns what it said; fails with all of that where it failed.
pub(crate) async fn run(mut command: Command) -> String {
    let shown = format!("{command:?}");
    let output = tokio::task::spawn_blocking(move || command.output()).await.expect("it runs");
    let Output { status, stdout, stderr } = output.unwrap_or_else(|error| panic!("{shown}: {error}"));
    let said = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{shown}: {status}\n{said}");
    said
}

/// The description as this world serves it, in a file.
pub(crate) async fn description(world: &World, folder: &Path) -> PathBuf {
    let described = world.stranger().get("/api/v1/openapi.json").await;
    let path = folder.join("openapi.json");
    std::fs::write(&path, described.text).expect("the description can be written down");
    path
}
