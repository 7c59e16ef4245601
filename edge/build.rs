//! Takes what the pages with a terminal and with a recording are made of from npm, exactly as `terminal-page/package-lock.json` pins it, and lays the files of
//! it that are served into `OUT_DIR`. The page's own files are built in as they stand in the checkout.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs, io};

const PAGE: &str = "terminal-page";
const MANIFESTS: [&str; 2] = ["package.json", "package-lock.json"];
/// What is served of what is installed.
const SERVED: [&str; 5] = [
    "@xterm/xterm/lib/xterm.mjs",
    "@xterm/xterm/css/xterm.css",
    "@xterm/addon-fit/lib/addon-fit.mjs",
    "asciinema-player/dist/bundle/asciinema-player.min.js",
    "asciinema-player/dist/bundle/asciinema-player.css",
];

// How a build script speaks to cargo.
#[allow(clippy::print_stdout)]
fn main() {
    for name in MANIFESTS {
        println!("cargo::rerun-if-changed={PAGE}/{name}");
    }
    if let Err(why) = install() {
        println!("cargo::error={why}");
    }
}

fn install() -> Result<(), String> {
    let (from, out) = (folder("CARGO_MANIFEST_DIR")?.join(PAGE), folder("OUT_DIR")?);
    let installed = out.join(PAGE);
    let laid_out = || -> io::Result<()> {
        fs::create_dir_all(&installed)?;
        MANIFESTS.iter().try_for_each(|name| fs::copy(from.join(name), installed.join(name)).map(drop))
    };
    laid_out().map_err(|error| format!("the page with a terminal cannot be laid out in {}: {error}", out.display()))?;
    npm_ci(&installed)?;
    for file in SERVED {
        let path = installed.join("node_modules").join(file);
        let name = path.file_name().unwrap_or_default();
        fs::copy(&path, out.join(name)).map_err(|error| format!("npm installed no {file}: {error}"))?;
    }
    Ok(())
}

fn npm_ci(folder: &Path) -> Result<(), String> {
    let arguments = ["ci", "--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund", "--loglevel=error"];
    let ran = Command::new("npm").args(arguments).current_dir(folder).stdin(Stdio::null()).output();
    let ran = ran.map_err(|error| {
        format!(
            "npm does not start ({error}), and the page with a terminal is made of what it installs: install Node.js and npm \
             (Debian: apt-get install nodejs npm)"
        )
    })?;
    if ran.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ran.stderr).lines().take(3).collect::<Vec<_>>().join("; ");
    Err(format!("npm cannot install edge/{PAGE}; its registry, or a cache of it, must be there: {said}"))
}

fn folder(variable: &str) -> Result<PathBuf, String> {
    env::var_os(variable).map(PathBuf::from).ok_or_else(|| format!("cargo sets no {variable}"))
}
