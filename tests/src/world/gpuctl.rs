//! `gpuctl` as a user runs it: with a home of its own, in a pipe or in a terminal.

use super::{PATIENCE, World};
use pty_process::{OwnedReadPty, OwnedWritePty, Size};
use secrecy::ExposeSecret as _;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// Somebody's `gpuctl`, and what it keeps for them.
pub struct Gpuctl {
    program: PathBuf,
    home: tempfile::TempDir,
    variables: Vec<(String, String)>,
}

/// What a command has come to.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ran {
    /// What was printed, of a command that went well.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        self.out
    }

    /// The same as JSON.
    #[track_caller]
    pub fn json(self) -> Value {
        let out = self.ok();
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    /// What was told, of a command that ended with this code.
    #[track_caller]
    pub fn failed(self, code: i32) -> String {
        assert_eq!(self.code, code, "{self:?}");
        self.err
    }
}

impl World {
    /// Of a user who has the addresses of this world, and has not logged in.
    #[must_use]
    pub fn gpuctl(&self) -> Gpuctl {
        self.gpuctl_at(&format!("https://{}", self.public.address()))
    }

    /// The same, at another address.
    #[must_use]
    pub fn gpuctl_at(&self, server: &str) -> Gpuctl {
        let program = self.settings.executable.with_file_name("gpuctl");
        assert!(program.is_file(), "{} is missing: run `cargo build --bins` first", program.display());
        let variables = [
            ("SVC_BASE_URL", server.to_owned()),
            ("SVC_CA_BUNDLE_PATH", self.authority.certificate_path().display().to_string()),
            ("SVC_OIDC_ISSUER", self.identity.issuer()),
            ("SVC_CLIENT_ID", supervisors::dev::identity::CLIENT_ID.to_owned()),
            ("SVC_CLIENT_SECRET", self.identity.client_secret().expose_secret().to_owned()),
        ];
        let variables = variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Gpuctl { program, home: tempfile::tempdir().expect("a home can be made"), variables }
    }

    /// Somebody's `gpuctl`, logged in with their password.
    pub async fn logged_in(&self, username: &str) -> Gpuctl {
        let gpuctl = self.gpuctl();
        self.log_in(&gpuctl, username).await.ok();
        gpuctl
    }

    pub async fn log_in(&self, gpuctl: &Gpuctl, username: &str) -> Ran {
        let person = self.identity.person(username).expect("somebody of that name");
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

    /// Where it keeps logins.
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

    pub async fn run(&self, arguments: &[&str]) -> Ran {
        self.run_with(arguments, "").await
    }

    /// With this on its standard input.
    pub async fn run_with(&self, arguments: &[&str], typed: &str) -> Ran {
        let mut child = self.command(arguments).stdin(Stdio::piped()).spawn().expect("gpuctl can be run");
        let mut stdin = child.stdin.take().expect("it listens");
        // One that ends without having listened is no failure of the test.
        let _ = stdin.write_all(typed.as_bytes()).await;
        drop(stdin);
        let ran = timeout(2 * PATIENCE, child.wait_with_output()).await.expect("gpuctl ends").expect("it ran");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it prints text");
        Ran { code: ran.status.code().unwrap_or(-1), out: text(ran.stdout), err: text(ran.stderr) }
    }

    /// In a terminal of this size.
    #[must_use]
    pub fn in_terminal(&self, arguments: &[&str], columns: u16, rows: u16) -> OnScreen {
        let command = pty_process::Command::new(&self.program).args(arguments).env_clear();
        OnScreen::begin(command.envs(self.environment()), columns, rows)
    }
}

fn pty_path(pty: &pty_process::Pty) -> std::os::fd::OwnedFd {
    use std::os::fd::AsFd as _;
    pty.as_fd().try_clone_to_owned().expect("it can be looked at")
}

/// A running program, `gpuctl` mostly, in a terminal.
pub struct OnScreen {
    screen: OwnedReadPty,
    keyboard: OwnedWritePty,
    child: Child,
    modes: std::fs::File,
    pub shown: Vec<u8>,
}

impl OnScreen {
    /// Any program in a terminal, in this folder and with these variables beside the test's own.
    #[must_use]
    pub fn of(program: &str, arguments: &[&str], folder: &Path, variables: &[(&str, &str)]) -> Self {
        let command = pty_process::Command::new(program).args(arguments).current_dir(folder);
        let command = command.env("TERM", "xterm").env_remove("XDG_CONFIG_HOME");
        Self::begin(command.envs(variables.iter().copied()), 120, 40)
    }

    fn begin(command: pty_process::Command, columns: u16, rows: u16) -> Self {
        let (pty, pts) = pty_process::open().expect("there are terminals");
        pty.resize(Size::new(rows, columns)).expect("it has a size");
        // The test's own end of it stays open, to look at its modes.
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

    /// Whether every key goes to the program at once.
    #[must_use]
    pub fn is_raw(&self) -> bool {
        let modes = nix::sys::termios::tcgetattr(&self.modes).expect("a terminal has modes");
        !modes.local_flags.contains(nix::sys::termios::LocalFlags::ICANON)
    }

    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.shown).into_owned()
    }

    /// Takes in what is shown. `false`: nothing came in that time, or nothing comes any more.
    pub async fn look(&mut self, within: Duration) -> bool {
        let mut chunk = [0; 16 * 1024];
        // Whoever was at the other end of the terminal is gone: EIO.
        let Ok(Ok(count)) = timeout(within, self.screen.read(&mut chunk)).await else { return false };
        self.shown.extend_from_slice(&chunk[..count]);
        count > 0
    }

    /// Waits until this is shown.
    pub async fn shows(&mut self, text: &str) {
        self.waits(text, |shown| shown.contains(text)).await;
    }

    /// Waits until anything is shown.
    pub async fn shows_something(&mut self) {
        self.waits("anything", |shown| !shown.is_empty()).await;
    }

    async fn waits(&mut self, what: &str, seen: impl Fn(&str) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !seen(&self.text()) {
            let ended = self.child.try_wait().expect("it can be asked");
            if ended.is_some() {
                self.look_to_the_end().await;
            }
            let late = Instant::now() >= until || ended.is_some();
            assert!(!late || seen(&self.text()), "{what:?} is never shown ({ended:?}): {}", self.text());
            self.look(Duration::from_millis(200)).await;
        }
    }

    /// Takes in what a program that has ended said before: the terminal may hand it over after its end.
    async fn look_to_the_end(&mut self) {
        while self.look(Duration::from_secs(2)).await {}
    }

    /// Its end, with everything shown that it said.
    pub async fn ends(&mut self) -> ExitStatus {
        let until = Instant::now() + PATIENCE;
        loop {
            while self.look(Duration::from_millis(50)).await {}
            if let Some(status) = self.child.try_wait().expect("it can be asked") {
                self.look_to_the_end().await;
                return status;
            }
            assert!(Instant::now() < until, "it never ends: {}", self.text());
        }
    }
}
