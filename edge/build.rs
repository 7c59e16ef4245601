//! Makes the pages for browsers, with the cargo feature `console`: lays out what the pages with a terminal and with a recording have from npm, and builds
//! the web console (`console/`). What is taken from npm is what the lock files pin; scripts of packages do not run. Each is made in `OUT_DIR`, and
//! again where a file that it is made of has changed. Without the feature nothing is made, and Node.js is not needed.

// How a build script speaks to cargo.
#![allow(clippy::print_stdout)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, fs, io, thread};

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

const CONSOLE: &str = "console";
/// What the console is made of, beside the description of the API.
const CONSOLE_SOURCES: [&str; 8] =
    ["package.json", "package-lock.json", ".npmrc", "index.html", "tsconfig.json", "vite.config.ts", "scripts", "src"];
const API_DESCRIPTION: &str = "src/api/tests/snapshots/edge__api__tests__contract__openapi.snap";
/// The lock file that `node_modules` is the installation of: written last.
const INSTALLED: &str = "node_modules/.installed-lock.json";

/// The versions of Node.js that build the console: 20.19 and later ones of 20, 22.12 and later (Vite's own bounds).
const NODE_AT_LEAST: [(u32, u32); 2] = [(20, 19), (22, 12)];
/// npm's registry may fail for a moment: the pauses between the attempts to install.
const PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(8)];
/// Where `deploy/lib.sh` puts a newer Node.js than the machine's, in the checkout.
const NODE_OF_CHECKOUT: &str = ".dev/tools/node/bin";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CONSOLE").is_none() {
        return;
    }
    for name in MANIFESTS {
        println!("cargo::rerun-if-changed={PAGE}/{name}");
    }
    for name in CONSOLE_SOURCES {
        println!("cargo::rerun-if-changed={CONSOLE}/{name}");
    }
    println!("cargo::rerun-if-changed={API_DESCRIPTION}");
    if let Err(why) = build() {
        println!("cargo::error={why}");
    }
}

fn build() -> Result<(), String> {
    let (from, out) = (folder("CARGO_MANIFEST_DIR")?, folder("OUT_DIR")?);
    let node = Node::find(&from)?;
    lay_out_terminal_page(&node, &from.join(PAGE), &out)?;
    build_console(&node, &from, &out)
}

fn lay_out_terminal_page(node: &Node, from: &Path, out: &Path) -> Result<(), String> {
    let installed = out.join(PAGE);
    let laid_out = || -> io::Result<()> {
        fs::create_dir_all(&installed)?;
        MANIFESTS.iter().try_for_each(|name| fs::copy(from.join(name), installed.join(name)).map(drop))
    };
    laid_out().map_err(|error| format!("the page with a terminal cannot be laid out in {}: {error}", out.display()))?;
    node.npm_ci(&installed, PAGE)?;
    for file in SERVED {
        let path = installed.join("node_modules").join(file);
        let name = path.file_name().unwrap_or_default();
        fs::copy(&path, out.join(name)).map_err(|error| format!("npm installed no {file}: {error}"))?;
    }
    Ok(())
}

fn build_console(node: &Node, manifest_dir: &Path, out: &Path) -> Result<(), String> {
    let (from, to) = (manifest_dir.join(CONSOLE), out.join(CONSOLE));
    let laid_out = || -> io::Result<()> {
        fs::create_dir_all(&to)?;
        // A page that was deleted is not built any more.
        for name in ["src", "scripts", "dist"] {
            if to.join(name).exists() {
                fs::remove_dir_all(to.join(name))?;
            }
        }
        CONSOLE_SOURCES.iter().try_for_each(|name| copy(&from.join(name), &to.join(name)))
    };
    laid_out().map_err(|error| format!("the console cannot be laid out in {}: {error}", to.display()))?;
    let lock =
        fs::read(to.join("package-lock.json")).map_err(|error| format!("edge/{CONSOLE} has no lock file: {error}"))?;
    if fs::read(to.join(INSTALLED)).ok().as_ref() != Some(&lock) {
        node.npm_ci(&to, CONSOLE)?;
        fs::write(to.join(INSTALLED), &lock)
            .map_err(|error| format!("npm installed nothing in {}: {error}", to.display()))?;
    }
    let mut command = node.npm(&to);
    command.args(["run", "--silent", "build"]).env("GPUAAS_API_DESCRIPTION", manifest_dir.join(API_DESCRIPTION));
    let ran = command.output().map_err(|error| format!("npm does not start: {error}"))?;
    if !ran.status.success() {
        // The compiler of TypeScript writes its complaints to its standard output.
        let output = [ran.stdout, ran.stderr].concat();
        return Err(format!("edge/{CONSOLE} cannot be built: {}", first_lines(&output, 12)));
    }
    write_table(&to.join("dist"), &out.join("console_files.rs"))
}

/// Writes the table of the console's files: name, content, and the same compressed by brotli.
fn write_table(dist: &Path, table: &Path) -> Result<(), String> {
    let problem = |error: io::Error| format!("the files of the console cannot be listed: {error}");
    let mut names = vec!["index.html".to_owned()];
    for entry in fs::read_dir(dist.join("assets")).map_err(problem)? {
        let name = entry.map_err(problem)?.file_name().to_string_lossy().into_owned();
        if !name.ends_with(".br") {
            names.push(format!("assets/{name}"));
        }
    }
    names.sort_unstable();
    let row = |name: &String| {
        let path = dist.join(name).display().to_string();
        format!("({name:?}, include_bytes!({path:?}), include_bytes!({:?})),\n", format!("{path}.br"))
    };
    let rows: String = names.iter().map(row).collect();
    fs::write(table, format!("&[\n{rows}]\n")).map_err(problem)
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if !from.is_dir() {
        return fs::copy(from, to).map(drop);
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        copy(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

/// A Node.js that is new enough, with its npm.
struct Node {
    /// `PATH` with its folder first.
    path: std::ffi::OsString,
}

impl Node {
    /// That of `PATH`, or the checkout's own.
    fn find(manifest_dir: &Path) -> Result<Self, String> {
        let path = env::var_os("PATH").unwrap_or_default();
        let own = manifest_dir.parent().unwrap_or(manifest_dir).join(NODE_OF_CHECKOUT);
        let with_own = env::join_paths([own].into_iter().chain(env::split_paths(&path)));
        let candidates = [Some(path), with_own.ok()].map(|path| path.map(|path| Self { path }));
        let mut found = Vec::new();
        for node in candidates.into_iter().flatten() {
            match node.version() {
                Some(version) if is_new_enough(&version) => return Ok(node),
                other => found.extend(other),
            }
        }
        let found =
            found.first().map_or_else(|| "none is installed".to_owned(), |version| format!("{version} is installed"));
        Err(format!(
            "the web console needs Node.js 20.19, 22.12 or later, with npm, and {found}: run `deploy/up --once`, which takes one from PyPI into \
             .dev/tools, put one on PATH, or build without the console (--no-default-features)"
        ))
    }

    fn version(&self) -> Option<String> {
        let ran = Command::new("node").arg("--version").env("PATH", &self.path).stdin(Stdio::null()).output().ok()?;
        Some(String::from_utf8_lossy(&ran.stdout).trim().to_owned())
    }

    fn npm(&self, folder: &Path) -> Command {
        let mut command = Command::new("npm");
        command.env("PATH", &self.path).current_dir(folder).stdin(Stdio::null());
        command
    }

    /// What is in npm's cache is not downloaded. `deploy/lib.sh` has one for all checkouts (`npm_config_cache`).
    fn npm_ci(&self, folder: &Path, name: &str) -> Result<(), String> {
        let arguments =
            ["ci", "--ignore-scripts", "--omit=dev", "--prefer-offline", "--no-audit", "--no-fund", "--loglevel=error"];
        let mut pauses = PAUSES.into_iter();
        loop {
            let ran = self.npm(folder).args(arguments).output().map_err(|error| {
                format!("npm does not start ({error}): install it beside Node.js (Debian: apt-get install npm)")
            })?;
            if ran.status.success() {
                return Ok(());
            }
            let Some(pause) = pauses.next() else {
                return Err(format!(
                    "npm cannot install edge/{name} in {} attempts; its registry, or a cache of it, must be there: {}",
                    PAUSES.len() + 1,
                    first_lines(&ran.stderr, 3)
                ));
            };
            thread::sleep(pause);
        }
    }
}

fn is_new_enough(version: &str) -> bool {
    let mut parts = version.trim_start_matches('v').split('.').map_while(|part| part.parse::<u32>().ok());
    let (Some(major), Some(minor)) = (parts.next(), parts.next()) else { return false };
    let [(old, old_minor), (new, new_minor)] = NODE_AT_LEAST;
    (major == old && minor >= old_minor) || (major == new && minor >= new_minor) || major > new
}

fn first_lines(output: &[u8], lines: usize) -> String {
    String::from_utf8_lossy(output)
        .lines()
        .filter(|line| !line.trim().is_empty())
        .take(lines)
        .collect::<Vec<_>>()
        .join("; ")
}

fn folder(variable: &str) -> Result<PathBuf, String> {
    env::var_os(variable).map(PathBuf::from).ok_or_else(|| format!("cargo sets no {variable}"))
}
