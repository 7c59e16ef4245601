//! `gpuctl` as a user runs it: with a home folder of its own, in a pipe or in a terminal.

use super::{TestCluster, WAIT_TIMEOUT};
use pty_process::{OwnedReadPty, OwnedWritePty, Size};
use secrecy::ExposeSecret as _;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// A user's `gpuctl` with its environment and home folder.
pub struct Gpuctl {
    program: PathBuf,
    home: tempfile::TempDir,
    variables: Vec<(String, String)>,
}

/// The exit code and output of a command.
#[derive(Debug)]
pub struct GpuctlOutput {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl GpuctlOutput {
    /// The standard output of a successful command.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        self.out
    }

    /// The standard output of a successful command, parsed as JSON.
    #[track_caller]
    pub fn json(self) -> Value {
        let out = self.ok();
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    /// The standard error of a command that failed with this code.
    #[track_caller]
    pub fn failed(self, code: i32) -> String {
        assert_eq!(self.code, code, "{self:?}");
        self.err
    }
}

impl TestCluster {
    /// A `gpuctl` with the addresses of this cluster, not logged in.
    #[must_use]
    pub fn gpuctl(&self) -> Gpuctl {
        self.gpuctl_at(&format!("https://{}", self.public.address()))
    }

    /// As [`TestCluster::gpuctl`], at another address.
    #[must_use]
    pub fn gpuctl_at(&self, server: &str) -> Gpuctl {
        let program = self.settings.executable.with_file_name("gpuctl");
        assert!(program.is_file(), "{} is missing: run `cargo build --bins` first", program.display());
        let variables = [
            ("SVC_BASE_URL", server.to_owned()),
            ("SVC_CA_BUNDLE_PATH", self.authority.certificate_path().display().to_string()),
            ("SVC_OIDC_ISSUER", self.identity.issuer()),
            ("SVC_CLIENT_ID", local_servers::identity::CLIENT_ID.to_owned()),
            ("SVC_CLIENT_SECRET", self.identity.client_secret().expose_secret().to_owned()),
        ];
        let variables = variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Gpuctl { program, home: tempfile::tempdir().expect("a home can be made"), variables }
    }

    /// A `gpuctl` that is logged in with the user's password.
    pub async fn logged_in(&self, username: &str) -> Gpuctl {
        let gpuctl = self.gpuctl();
        self.log_in(&gpuctl, username).await.ok();
        gpuctl
    }

    pub async fn log_in(&self, gpuctl: &Gpuctl, username: &str) -> GpuctlOutput {
        let person = self.identity.person(username).expect("there is a user of that name");
        let typed = format!("{}\n", person.password.expose_secret());
        gpuctl.run_with(&["login", "--username", username, "--password-stdin"], &typed).await
    }
}

impl Gpuctl {
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.variables.retain(|(known, _)| known != name);
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.variables.retain(|(known, _)| known != name);
        self
    }

    /// The folder in which it stores logins.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        self.home.path().join("gpuctl")
    }

    #[must_use]
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    fn environment(&self) -> impl Iterator<Item = (String, String)> {
        let path = std::env::var("PATH").unwrap_or_default();
        let home = self.home.path().display().to_string();
        let own = [("PATH", path), ("HOME", home.clone()), ("XDG_CONFIG_HOME", home), ("TERM", "xterm".to_owned())];
        own.into_iter().map(|(name, value)| (name.to_owned(), value)).chain(self.variables.clone())
    }

    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).env_clear().envs(self.environment()).kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub async fn run(&self, arguments: &[&str]) -> GpuctlOutput {
        self.run_with(arguments, "").await
    }

    /// Runs a command with this standard input.
    pub async fn run_with(&self, arguments: &[&str], typed: &str) -> GpuctlOutput {
        let mut child = self.command(arguments).stdin(Stdio::piped()).spawn().expect("gpuctl can be run");
        let mut stdin = child.stdin.take().expect("it listens");
        // A program that ends without reading its input does not fail the test.
        let _ = stdin.write_all(typed.as_bytes()).await;
        drop(stdin);
        let ran = timeout(2 * WAIT_TIMEOUT, child.wait_with_output()).await.expect("gpuctl ends").expect("it ran");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it prints text");
        GpuctlOutput { code: ran.status.code().unwrap_or(-1), out: text(ran.stdout), err: text(ran.stderr) }
    }

    /// Runs a command in a terminal of this size.
    #[must_use]
    pub fn run_in_pty(&self, arguments: &[&str], columns: u16, rows: u16) -> PtySession {
        let command = pty_process::Command::new(&self.program).args(arguments).env_clear();
        PtySession::spawn(command.envs(self.environment()), columns, rows)
    }
}

fn pty_path(pty: &pty_process::Pty) -> std::os::fd::OwnedFd {
    use std::os::fd::AsFd as _;
    pty.as_fd().try_clone_to_owned().expect("it can be looked at")
}

/// A program in a pseudo-terminal, mostly `gpuctl`.
pub struct PtySession {
    screen: OwnedReadPty,
    keyboard: OwnedWritePty,
    child: Child,
    modes: std::fs::File,
    pub shown: Vec<u8>,
}

impl PtySession {
    /// Any program in a terminal, in this folder and with these variables in addition to the test's own.
    #[must_use]
    pub fn of(program: &str, arguments: &[&str], folder: &Path, variables: &[(&str, &str)]) -> Self {
        let command = pty_process::Command::new(program).args(arguments).current_dir(folder);
        let command = command.env("TERM", "xterm").env_remove("XDG_CONFIG_HOME");
        Self::spawn(command.envs(variables.iter().copied()), 120, 40)
    }

    fn spawn(command: pty_process::Command, columns: u16, rows: u16) -> Self {
        let (pty, pts) = pty_process::open().expect("there are terminals");
        pty.resize(Size::new(rows, columns)).expect("it has a size");
        // The test keeps an end of it open to read its modes.
        let modes = std::fs::File::from(pty_path(&pty));
        let child = command.kill_on_drop(true).spawn(pts).expect("it can be run");
        let (screen, keyboard) = pty.into_split();
        Self { screen, keyboard, child, modes, shown: Vec::new() }
    }

    pub async fn enter(&mut self, text: &str) {
        self.keyboard.write_all(text.as_bytes()).await.expect("the terminal takes keys");
    }

    pub fn resize(&self, columns: u16, rows: u16) {
        self.keyboard.resize(Size::new(rows, columns)).expect("it has a size");
    }

    #[must_use]
    pub fn pid(&self) -> nix::unistd::Pid {
        let pid = self.child.id().expect("it runs");
        nix::unistd::Pid::from_raw(pid.cast_signed())
    }

    /// Whether the terminal is in raw mode: every key goes to the program at once.
    #[must_use]
    pub fn is_raw(&self) -> bool {
        let modes = nix::sys::termios::tcgetattr(&self.modes).expect("a terminal has modes");
        !modes.local_flags.contains(nix::sys::termios::LocalFlags::ICANON)
    }

    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.shown).into_owned()
    }

    /// Reads output. `false`: no output within that time, or the end of it.
    pub async fn read_output(&mut self, within: Duration) -> bool {
        let mut chunk = [0; 16 * 1024];
        // The process at the other end of the terminal is gone: EIO.
        let Ok(Ok(count)) = timeout(within, self.screen.read(&mut chunk)).await else { return false };
        self.shown.extend_from_slice(&chunk[..count]);
        count > 0
    }

    /// Waits until the output contains this.
    pub async fn expect_output(&mut self, text: &str) {
        self.wait_for(text, |shown| shown.contains(text)).await;
    }

    /// Waits until there is any output.
    pub async fn expect_any_output(&mut self) {
        self.wait_for("anything", |shown| !shown.is_empty()).await;
    }

    /// Waits until the whole output is as wanted.
    pub async fn wait_for(&mut self, what: &str, seen: impl Fn(&str) -> bool) {
        let until = Instant::now() + WAIT_TIMEOUT;
        while !seen(&self.text()) {
            let ended = self.child.try_wait().expect("it can be asked");
            if ended.is_some() {
                self.read_to_end().await;
            }
            let late = Instant::now() >= until || ended.is_some();
            assert!(!late || seen(&self.text()), "{what:?} is never shown ({ended:?}): {}", self.text());
            self.read_output(Duration::from_millis(200)).await;
        }
    }

    /// Reads the remaining output of a program that has exited: the terminal may deliver it afterwards.
    async fn read_to_end(&mut self) {
        while self.read_output(Duration::from_secs(2)).await {}
    }

    /// Waits for the exit, and reads all output.
    pub async fn wait_for_exit(&mut self) -> ExitStatus {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            while self.read_output(Duration::from_millis(50)).await {}
            if let Some(status) = self.child.try_wait().expect("it can be asked") {
                self.read_to_end().await;
                return status;
            }
            assert!(Instant::now() < until, "it never ends: {}", self.text());
        }
    }
}
