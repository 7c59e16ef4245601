//! Third-party programs that deploy/test installs, with which tests check the service from outside.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tests::cluster::TestCluster;

/// The root of the checkout.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the checkout").to_owned()
}

/// The folder into which deploy/test installs.
pub(crate) fn tools() -> PathBuf {
    std::env::var_os("GPUAAS_TOOLS_DIR").map_or_else(|| root().join(".dev/tools"), PathBuf::from)
}

/// The path of something that deploy/test has installed. A test without it fails.
pub(crate) fn installed(path: &str) -> PathBuf {
    let path = tools().join(path);
    assert!(path.exists(), "{} is missing: `deploy/test --tools` installs it", path.display());
    path
}

/// A Python program among the tools of the API contract.
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

/// A headless browser without network access beyond this machine, which logs its requests.
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

/// Runs a command to its end and returns its output; panics with the output if it fails.
pub(crate) async fn run(mut command: Command) -> String {
    let shown = format!("{command:?}");
    let output = tokio::task::spawn_blocking(move || command.output()).await.expect("it runs");
    let Output { status, stdout, stderr } = output.unwrap_or_else(|error| panic!("{shown}: {error}"));
    let printed = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{shown}: {status}\n{printed}");
    printed
}

/// Saves the OpenAPI description that this cluster serves in a file.
pub(crate) async fn description(cluster: &TestCluster, folder: &Path) -> PathBuf {
    let described = cluster.anonymous_client().get("/api/v1/openapi.json").await;
    let path = folder.join("openapi.json");
    std::fs::write(&path, described.text).expect("the description can be written down");
    path
}
