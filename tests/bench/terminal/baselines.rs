//! The baselines: terminado in a process of its own, and `ssh -tt` to an sshd of this machine.

use anyhow::{Context, ensure};
use local_servers::ports::free_port;
use local_servers::private_files;
use local_servers::process::{ChildProcess, Launch};
use std::net::{SocketAddr, TcpStream as Probe};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio_tungstenite::client_async;

use super::shell::Shell;

const STARTS_WITHIN: Duration = Duration::from_secs(10);

pub(crate) struct Terminado {
    port: u16,
    process: Child,
}

impl Terminado {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let tools = std::env::var_os("GPUAAS_TOOLS_DIR").map(PathBuf::from).unwrap_or_default();
        let python = tools.join("terminado/bin/python");
        ensure!(python.is_file(), "{} is missing: deploy/bench installs it", python.display());
        let mut process = Command::new(python)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/terminal/server.py"))
            .args(["bash", "--noprofile", "--norc"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let out = process.stdout.take().context("terminado has no output")?;
        let line = BufReader::new(out).lines().next_line().await?.context("terminado does not start")?;
        Ok(Self { port: line.trim().parse()?, process })
    }

    pub(crate) fn pid(&self) -> anyhow::Result<u32> {
        self.process.id().context("terminado has ended")
    }

    pub(crate) async fn shell(&self) -> anyhow::Result<Shell> {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).await?;
        stream.set_nodelay(true)?;
        let (socket, _) = client_async(format!("ws://127.0.0.1:{}/shell", self.port), stream).await?;
        Shell::Terminado(Box::new(socket)).made_plain().await
    }
}

/// An sshd that accepts this user alone.
pub(crate) struct Sshd {
    address: SocketAddr,
    folder: tempfile::TempDir,
    _process: ChildProcess,
}

impl Sshd {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("gpuaas-bench-ssh-").tempdir()?;
        let at = |name: &str| folder.path().join(name);
        for key in ["host", "user"] {
            let made =
                Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(at(key)).status().await;
            ensure!(made.context("there is no ssh-keygen: deploy/bench installs it")?.success(), "ssh-keygen failed");
        }
        private_files::write_private(&at("keys"), &std::fs::read(at("user.pub"))?)?;
        // Debian's sshd requires it.
        if nix::unistd::geteuid().is_root() {
            std::fs::create_dir_all("/run/sshd")?;
        }
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()?));
        let configuration = format!(
            "ListenAddress {address}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nUsePAM no\nStrictModes no\n\
             PermitRootLogin prohibit-password\nPasswordAuthentication no\nPrintMotd no\nPrintLastLog no\n",
            at("host").display(),
            at("keys").display(),
        );
        private_files::write_private(&at("sshd_config"), configuration.as_bytes())?;
        let launch = Launch::new("sshd", "/usr/sbin/sshd", at("log")).arguments(["-D", "-e", "-f"]);
        let mut process = launch.argument(at("sshd_config")).spawn()?;
        let until = Instant::now() + STARTS_WITHIN;
        while Probe::connect(address).is_err() {
            let waits = process.exit_status().is_none() && Instant::now() < until;
            ensure!(waits, "sshd does not start: {}", process.log_tail());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(Self { address, folder, _process: process })
    }

    /// The throughput of a file's output, in megabytes a second, without the login.
    pub(crate) async fn cat(&self, path: &str, bytes: u64) -> anyhow::Result<f64> {
        let at = |name: &str| self.folder.path().join(name).display().to_string();
        let user = nix::unistd::User::from_uid(nix::unistd::geteuid())?.context("this user has no name")?.name;
        let mut ssh = Command::new("ssh")
            .args(["-tt", "-q", "-F", "none", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-o"])
            .arg(format!("UserKnownHostsFile={}", at("known_hosts")))
            .args(["-i", &at("user"), "-p", &self.address.port().to_string(), &format!("{user}@127.0.0.1")])
            .arg(format!("echo rea''dy; read line; cat {path}; echo all''shown"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("there is no ssh: deploy/bench installs it")?;
        let (mut tell, mut out) = (ssh.stdin.take().context("no input")?, ssh.stdout.take().context("no output")?);
        read_until(&mut out, b"ready").await.context("ssh does not log in")?;
        let began = Instant::now();
        tell.write_all(b"\n").await?;
        let count = read_until(&mut out, b"allshown").await?;
        let took = began.elapsed();
        ensure!(count >= bytes, "{count} of {bytes} bytes came by ssh");
        Ok(bytes as f64 / 1e6 / took.as_secs_f64())
    }
}

/// The throughput of a file's output to a program which does nothing but read its pseudo-terminal, in megabytes a second.
pub(crate) async fn only_read(path: &str, bytes: u64) -> anyhow::Result<f64> {
    let (mut pty, pts) = pty_process::open()?;
    let began = Instant::now();
    let mut cat = pty_process::Command::new("cat").arg(path).kill_on_drop(true).spawn(pts)?;
    let (mut buffer, mut count) = (vec![0; 64 * 1024], 0);
    while count < bytes {
        count += pty.read(&mut buffer).await? as u64;
    }
    let took = began.elapsed();
    drop(pty);
    cat.wait().await?;
    Ok(bytes as f64 / 1e6 / took.as_secs_f64())
}

async fn read_until(out: &mut tokio::process::ChildStdout, marker: &[u8]) -> anyhow::Result<u64> {
    let (mut buffer, mut tail, mut count) = (vec![0; 64 * 1024], Vec::new(), 0_u64);
    loop {
        let length = out.read(&mut buffer).await?;
        ensure!(length > 0, "it ended after {count} bytes");
        count += length as u64;
        tail.extend_from_slice(&buffer[..length]);
        if tail.windows(marker.len()).any(|window| window == marker) {
            return Ok(count);
        }
        tail.drain(..tail.len().saturating_sub(marker.len()));
    }
}
