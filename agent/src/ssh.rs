//! SSH access of tenants: an sshd of the agent's own if it is configured with an address, otherwise the machine's.
//!
//! ```text
//! STATE/ssh/sshd_config     written at each start
//!          /host_key(.pub)  created once: the host key that the control plane tells tenants to expect
//!          /sshd.pid        while it listens
//!          /gpuaas-sshd-... the machine's sshd under the name of its PAM service
//! /etc/pam.d/gpuaas-sshd-...   while it listens: gives each tenant its own /tmp and /proc
//! ```
//!
//! The agent's own sshd admits only tenants, and only with a key. Established connections survive its restart.

use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::process::Command;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::atomic_file::{self, FileError};
use crate::bounded_tool::{Tool, ToolError};
use crate::chain;
use crate::process_attributes;
use crate::service_manager;
use crate::system_executor::private_tmp;

mod tenant_access;

pub use tenant_access::TenantAccess;

/// The machine's own host key.
const MACHINE_HOST_KEY: &str = "/etc/ssh/ssh_host_ed25519_key.pub";
/// The folder that sshd requires on Debian and others.
const RUN_FOLDER: &str = "/run/sshd";
/// Marks that an agent with this state folder created the run folder.
const RUN_FOLDER_MARKER: &str = "run-folder-made";
/// The folder of PAM's service configurations.
const PAM: &str = "/etc/pam.d";
/// The beginning of the names of agents' services.
const PAM_SERVICE: &str = "gpuaas-sshd-";
const PROGRAMS: [&str; 3] = ["/usr/sbin/sshd", "/usr/local/sbin/sshd", "/usr/bin/sshd"];
/// The beginning of the line with which sshd says that it listens.
const LISTENING: &str = "Server listening on ";
/// How long its last line may be on its way after its end.
const LAST_LINE_WAIT: Duration = Duration::from_millis(200);
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a program may take that makes a key or reads the configuration.
const TOOL_LIMIT: Duration = Duration::from_secs(30);
/// Output on one line beyond this length becomes another line of the log: strangers choose some of its text.
const MAX_LINE: u64 = 1024;

/// Why tenants have no SSH access.
#[derive(Debug, thiserror::Error)]
pub enum SshError {
    #[error("no sshd is installed; install openssh-server, or leave SVC_NODE_AGENT_SSH_LISTEN out")]
    NoProgram,
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error(transparent)]
    Store(#[from] FileError),
}

/// An sshd of the agent's own.
#[derive(Debug, Clone)]
pub struct Sshd {
    program: PathBuf,
    folder: PathBuf,
    /// `None` if the machine's PAM cannot give tenants a `/tmp` of their own.
    service: Option<PamService>,
}

/// The PAM service of this sshd's logins. Its name is unique for this agent, so that agents on one machine do not replace each other's.
#[derive(Debug, Clone)]
struct PamService {
    name: String,
}

impl PamService {
    fn of(state_dir: &Path) -> Option<Self> {
        let known = Path::new(PAM).is_dir() && private_tmp::is_known_to_pam();
        known.then(|| Self { name: Self::name(state_dir) })
    }

    fn name(state_dir: &Path) -> String {
        let digest = hex::encode(Sha256::digest(state_dir.as_os_str().as_encoded_bytes()));
        format!("{PAM_SERVICE}{}", &digest[..8])
    }

    fn path(name: &str) -> PathBuf {
        Path::new(PAM).join(name)
    }

    /// Only keys authenticate, which sshd decides. With systemd, the machine's own service puts logins into their users' slices.
    fn write(&self, systemd: bool) -> Result<(), FileError> {
        let text = Self::text(systemd && Self::path("sshd").exists());
        atomic_file::write_if_changed(&Self::path(&self.name), text.as_bytes(), atomic_file::PUBLIC).map(|_| ())
    }

    fn text(includes_machines: bool) -> String {
        let machines = if includes_machines {
            "account include sshd\nsession include sshd\n"
        } else {
            "account required pam_unix.so\n"
        };
        format!(
            "# Written by the node agent at each start.\nauth required pam_deny.so\n{machines}\
             session required pam_namespace.so mount_private ignore_config_error\n"
        )
    }
}

/// Whether this is what an agent writes as the PAM service of its sshd.
#[must_use]
pub fn is_own_pam_service(path: &Path, content: &[u8]) -> bool {
    let is_named_so = path.parent() == Some(Path::new(PAM))
        && path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(PAM_SERVICE.as_bytes()));
    is_named_so && [true, false].map(PamService::text).iter().any(|text| text.as_bytes() == content)
}

impl Sshd {
    /// Writes everything that sshd needs at its start, and ends a listener that an earlier agent left.
    ///
    /// # Errors
    /// [`SshError`].
    pub fn prepare(state_dir: &Path, keys: &Path, listen: SocketAddr) -> Result<Self, SshError> {
        let program = PROGRAMS.iter().map(PathBuf::from).find(|path| path.is_file()).ok_or(SshError::NoProgram)?;
        let folder = state_dir.join("ssh");
        atomic_file::private_folder(&folder)?;
        let mut sshd = Self { program, folder, service: PamService::of(state_dir) };
        sshd.make_host_key()?;
        sshd.make_run_folder().map_err(FileError::at("create", Path::new(RUN_FOLDER)))?;
        let systemd = Path::new("/run/systemd/system").is_dir();
        if let Some(service) = sshd.service.clone() {
            service.write(systemd)?;
            sshd.use_service_name(&service).map_err(FileError::at("link", &sshd.folder))?;
        }
        sshd.configure(keys, listen, systemd)?;
        sshd.end_previous_listener();
        Ok(sshd)
    }

    /// Makes the host key where there is none that can be used. Of two files that a power failure separates, the private one comes last.
    fn make_host_key(&self) -> Result<(), SshError> {
        if self.has_host_key()? {
            return Ok(());
        }
        let [new, new_public] = ["host_key.new", "host_key.new.pub"].map(|name| self.folder.join(name));
        atomic_file::remove(&new)?;
        atomic_file::remove(&new_public)?;
        let arguments = ["-q", "-t", "ed25519", "-N", "", "-C", "", "-f"];
        Tool::new("ssh-keygen").args(arguments).arg(&new).run(TOOL_LIMIT)?;
        let key = self.host_key();
        for (from, to) in [(new_public, self.public_host_key()), (new, key)] {
            let store = || {
                File::open(&from)?.sync_all()?;
                fs::rename(&from, &to)?;
                atomic_file::sync_folder(&self.folder)
            };
            store().map_err(FileError::at("write", &to))?;
        }
        Ok(())
    }

    /// Whether there is a host key that can be used. One that cannot, such as the half that an earlier release left, is moved aside: sshd does not
    /// start with it. A missing public key is written again.
    fn has_host_key(&self) -> Result<bool, SshError> {
        let key = self.host_key();
        if !key.exists() {
            return Ok(false);
        }
        // Others may have restored it from a backup. The tool refuses a key that all users can read.
        atomic_file::protect(&key, atomic_file::PRIVATE).map_err(FileError::at("protect", &key))?;
        match Tool::new("ssh-keygen").args(["-y", "-P", "", "-f"]).arg(&key).run(TOOL_LIMIT) {
            Ok(public) => {
                self.write_public_host_key(&public);
                Ok(true)
            }
            Err(error @ ToolError::Ended { .. }) if is_torn(&key, &error) => {
                let unreadable = self.folder.join("host_key.unreadable");
                warn!(
                    error_code = "host_key_unreadable",
                    error = chain(&error),
                    "the SSH host key cannot be read; it is moved to {}, and tenants are shown another key",
                    unreadable.display()
                );
                fs::rename(&key, &unreadable).map_err(FileError::at("move", &key))?;
                Ok(false)
            }
            // A tool that was killed, or had no memory, says nothing about the key.
            Err(error @ ToolError::Ended { .. }) => {
                warn!(error_code = "host_key", error = chain(&error), "the SSH host key was not checked");
                Ok(true)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn write_public_host_key(&self, public: &str) {
        let path = self.public_host_key();
        let present = fs::read_to_string(&path).ok().and_then(|present| fingerprint(&present));
        if present.is_some() && present == fingerprint(public) {
            return;
        }
        // Tenants log in without it, and are shown no fingerprint.
        if let Err(error) = atomic_file::write_atomically(&path, public.as_bytes(), atomic_file::PUBLIC) {
            warn!(
                error_code = "node_storage",
                error = chain(&error),
                "the public part of the SSH host key cannot be stored"
            );
        }
    }

    /// Before OpenSSH 9.8 the PAM service's name is the program's name.
    fn use_service_name(&mut self, service: &PamService) -> io::Result<()> {
        // sshd re-executes itself by this path, which has to be absolute.
        let link = self.folder.canonicalize()?.join(&service.name);
        if !fs::read_link(&link).is_ok_and(|present| present == self.program) {
            match fs::remove_file(&link) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
            std::os::unix::fs::symlink(&self.program, &link)?;
        }
        self.program = link;
        Ok(())
    }

    /// Writes the configuration, and lets sshd check it. sshd before OpenSSH 9.8 does not understand the PAM service's name in it.
    fn configure(&self, keys: &Path, listen: SocketAddr, systemd: bool) -> Result<(), SshError> {
        // Without a service of its own, PAM puts logins into their users' slices if systemd runs, and is of no use otherwise.
        let pam = systemd || self.service.is_some();
        let base = self.configuration(keys, listen, pam);
        let named = self.service.as_ref().map(|service| format!("{base}PAMServiceName {}\n", service.name));
        let mut checked = Ok(String::new());
        for text in named.into_iter().chain([base]) {
            if let Err(error) = atomic_file::write_if_changed(&self.config(), text.as_bytes(), atomic_file::PRIVATE) {
                // Tenants log in by what an earlier agent wrote, where a disk is full.
                warn!(
                    error_code = "node_storage",
                    error = chain(&error),
                    "sshd keeps the configuration of its last start"
                );
                checked = Tool::new(&self.program).arg("-t").arg("-f").arg(self.config()).run(TOOL_LIMIT);
                break;
            }
            checked = Tool::new(&self.program).arg("-t").arg("-f").arg(self.config()).run(TOOL_LIMIT);
            if checked.is_ok() {
                break;
            }
        }
        checked?;
        Ok(())
    }

    /// If it does not exist, the machine has no sshd of its own, and a decommissioned machine is to keep none of it.
    fn make_run_folder(&self) -> io::Result<()> {
        if !Path::new(RUN_FOLDER).exists() {
            fs::write(self.folder.join(RUN_FOLDER_MARKER), "")?;
            fs::create_dir(RUN_FOLDER)?;
        }
        Ok(())
    }

    fn config(&self) -> PathBuf {
        self.folder.join("sshd_config")
    }

    fn host_key(&self) -> PathBuf {
        self.folder.join("host_key")
    }

    fn public_host_key(&self) -> PathBuf {
        self.folder.join("host_key.pub")
    }

    fn pid_file(&self) -> PathBuf {
        self.folder.join("sshd.pid")
    }

    fn configuration(&self, keys: &Path, listen: SocketAddr, pam: bool) -> String {
        let quoted = |path: &Path| format!("\"{}\"", path.display());
        let (host_key, pid_file) = (quoted(&self.host_key()), quoted(&self.pid_file()));
        let keys = quoted(&keys.join("%u"));
        let pam = if pam { "yes" } else { "no" };
        format!(
            "# Written by the node agent at each start.\n\
             ListenAddress {listen}\n\
             HostKey {host_key}\n\
             PidFile {pid_file}\n\
             AuthorizedKeysFile {keys}\n\
             AuthenticationMethods publickey\n\
             PasswordAuthentication no\n\
             KbdInteractiveAuthentication no\n\
             HostbasedAuthentication no\n\
             PermitRootLogin no\n\
             AllowUsers gpu-*\n\
             PermitUserEnvironment no\n\
             PermitUserRC no\n\
             PermitTunnel no\n\
             AllowStreamLocalForwarding no\n\
             X11Forwarding no\n\
             UsePAM {pam}\n\
             Subsystem sftp internal-sftp\n"
        )
    }

    /// Runs it until it ends, and returns why; `None` where `stop` is cancelled. `on_listening` is called once tenants can log in.
    async fn serve(&self, stop: &CancellationToken, on_listening: impl Fn()) -> Option<String> {
        let mut sshd = match self.command().spawn() {
            Ok(sshd) => sshd,
            Err(error) => return Some(error.to_string()),
        };
        let (last_line, listening) = (Arc::new(Mutex::default()), Arc::new(Notify::new()));
        // Reads until the last holder has closed it: the connections outlive the listener.
        let logging =
            sshd.stderr.take().map(|stderr| tokio::spawn(log(stderr, Arc::clone(&last_line), Arc::clone(&listening))));
        let mut is_listening = false;
        let ended = loop {
            tokio::select! {
                ended = sshd.wait() => break ended,
                () = stop.cancelled() => {
                    self.end_previous_listener();
                    let _ = tokio::time::timeout(END_TIMEOUT, sshd.wait()).await;
                    return None;
                }
                () = listening.notified(), if !is_listening => {
                    is_listening = true;
                    info!("tenants can log in by SSH");
                    on_listening();
                }
            }
        };
        let ended = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
        if let Some(logging) = logging {
            let _ = tokio::time::timeout(LAST_LINE_WAIT, logging).await;
        }
        let last_line = last_line.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Some(if last_line.is_empty() { ended } else { format!("{ended}: {last_line}") })
    }

    fn command(&self) -> Command {
        let [shell, words @ ..] = process_attributes::command_prefix();
        let mut command = Command::new(shell);
        command.args(words).arg(&self.program).args(["-D", "-e", "-f"]).arg(self.config());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // It would notify the service manager of its own start.
        for name in service_manager::VARIABLES {
            command.env_remove(name);
        }
        command
    }

    /// Ends the listener that the pid file names, and none of its connections.
    fn end_previous_listener(&self) {
        end_listener(&self.pid_file(), &self.config());
    }
}

/// Logs sshd's messages: logins, refused logins, and errors.
async fn log(stderr: impl AsyncRead + Unpin, last_line: Arc<Mutex<String>>, listening: Arc<Notify>) {
    let mut stderr = BufReader::new(stderr);
    while let Some(line) = line(&mut stderr).await {
        info!(line, "sshd");
        if line.starts_with(LISTENING) {
            listening.notify_one();
        }
        *last_line.lock().unwrap_or_else(PoisonError::into_inner) = line;
    }
}

/// The next line, cut at the length that is logged.
async fn line(stderr: &mut (impl AsyncBufRead + Unpin)) -> Option<String> {
    let mut line = Vec::new();
    let read = stderr.take(MAX_LINE).read_until(b'\n', &mut line).await;
    read.is_ok_and(|read| read > 0).then(|| String::from_utf8_lossy(&line).trim_end().to_owned())
}

/// Ends a listener that an agent with this state folder left.
pub fn end_leftover_listener(state_dir: &Path) {
    let folder = state_dir.join("ssh");
    end_listener(&folder.join("sshd.pid"), &folder.join("sshd_config"));
    let _ = atomic_file::remove(&PamService::path(&PamService::name(state_dir)));
    if folder.join(RUN_FOLDER_MARKER).exists() && !is_run_folder_used() {
        // Fails if it is not empty.
        let _ = fs::remove_dir(RUN_FOLDER);
    }
}

/// Whether another sshd runs, of another agent or the machine's own: without the folder it admits no login.
fn is_run_folder_used() -> bool {
    let commands = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path().join("cmdline"));
    let is_sshd = |command: Vec<u8>| {
        let program = command.split(|byte| *byte == 0).next().unwrap_or_default();
        program
            .rsplit(|byte| *byte == b'/')
            .next()
            .is_some_and(|name| name == b"sshd" || name.starts_with(b"gpuaas-sshd-"))
    };
    commands.filter_map(|path| fs::read(path).ok()).any(is_sshd)
}

fn end_listener(pid_file: &Path, config: &Path) {
    let Ok(Some(text)) = atomic_file::read_if_there(pid_file) else { return };
    let Ok(pid) = text.trim().parse::<i32>() else { return };
    let is_ours = || {
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&command).contains(&config.display().to_string())
    };
    let began = std::time::Instant::now();
    // Another process may have the pid by now.
    while is_ours() && began.elapsed() < END_TIMEOUT {
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = atomic_file::remove(pid_file);
}

/// The public host key of the sshd that admits tenants of an agent with this state folder: its own, where it `has_own`, or the machine's.
#[must_use]
pub fn public_host_key(state_dir: &Path, has_own: bool) -> PathBuf {
    if has_own { state_dir.join("ssh/host_key.pub") } else { PathBuf::from(MACHINE_HOST_KEY) }
}

/// A public key in the form that SSH clients show; `None` if there is none.
#[must_use]
pub fn host_key_fingerprint(public_key: &Path) -> Option<String> {
    fingerprint(&fs::read_to_string(public_key).ok()?)
}

/// OpenSSH's `SHA256:` form of a public key in its text form.
fn fingerprint(public_key: &str) -> Option<String> {
    let blob = STANDARD.decode(public_key.split_whitespace().nth(1)?).ok()?;
    Some(format!("SHA256:{}", STANDARD_NO_PAD.encode(Sha256::digest(blob))))
}

/// Whether the file is no key: by its size, or by what `ssh-keygen` says of it.
fn is_torn(key: &Path, error: &ToolError) -> bool {
    let says = |words| matches!(error, ToolError::Ended { message, .. } if message.contains(words));
    fs::metadata(key).is_ok_and(|file| file.len() == 0)
        || ["invalid format", "error in libcrypto", "incorrect passphrase"].into_iter().any(says)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use nix::sys::stat::{Mode, umask};

    use super::*;

    #[tokio::test]
    async fn sshd_output_is_logged_in_lines_of_bounded_length() {
        let long = "x".repeat(1500);
        let stderr = format!("Server listening.\r\n{long}\nthe last");
        let mut stderr = BufReader::with_capacity(7, stderr.as_bytes());
        let mut lines = Vec::new();
        while let Some(line) = line(&mut stderr).await {
            lines.push(line);
        }
        assert_eq!(lines, ["Server listening.", &long[..1024], &long[1024..], "the last"]);
    }

    #[tokio::test]
    async fn sshd_session_has_login_umask_and_oom_score_not_the_agents() {
        umask(Mode::from_bits_truncate(0o077));
        fs::write("/proc/self/oom_score_adj", "500").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("sshd");
        atomic_file::write_atomically(
            &program,
            b"#!/bin/sh\numask >&2; cat /proc/self/oom_score_adj >&2; echo \"$@\" >&2\n",
            0o700,
        )
        .unwrap();
        let sshd = Sshd { program, folder: folder.path().to_owned(), service: None };
        let stderr = sshd.command().output().await.unwrap().stderr;
        let stderr = String::from_utf8(stderr).unwrap();
        let config = sshd.config().display().to_string();
        assert_eq!(stderr.lines().collect::<Vec<_>>(), ["0022", "0", &format!("-D -e -f {config}")]);
    }

    /// What is left of a host key whose making was interrupted, and whether the key is the same afterwards.
    #[test]
    fn host_key_that_was_torn_is_made_again_and_its_fingerprint_is_that_of_the_private_key() {
        let state = tempfile::tempdir().unwrap();
        let sshd = Sshd { program: PathBuf::from("sshd"), folder: state.path().join("ssh"), service: None };
        fs::create_dir(&sshd.folder).unwrap();
        let made = || {
            sshd.make_host_key().unwrap();
            let private = Tool::new("ssh-keygen").args(["-y", "-f"]).arg(sshd.host_key()).run(TOOL_LIMIT).unwrap();
            assert_eq!(host_key_fingerprint(&public_host_key(state.path(), true)), fingerprint(&private));
            fingerprint(&private).unwrap()
        };
        let first = made();
        assert_eq!(made(), first);
        for public in [None, Some(""), Some("ssh-ed25519 AAAA of another key")] {
            match public {
                None => fs::remove_file(sshd.public_host_key()).unwrap(),
                Some(text) => fs::write(sshd.public_host_key(), text).unwrap(),
            }
            assert_eq!(made(), first, "{public:?}");
        }
        fs::set_permissions(sshd.host_key(), Permissions::from_mode(0o644)).unwrap();
        assert_eq!(made(), first, "it was readable for all users");
        let half = fs::read(sshd.host_key()).unwrap();
        for torn in [&[][..], &half[..half.len() / 2]] {
            fs::write(sshd.host_key(), torn).unwrap();
            fs::write(sshd.folder.join("host_key.new"), "half").unwrap();
            assert_ne!(made(), first);
            assert_eq!(fs::read(sshd.folder.join("host_key.unreadable")).unwrap(), torn);
        }
        fs::remove_file(sshd.public_host_key()).unwrap();
        assert_eq!(host_key_fingerprint(&public_host_key(state.path(), true)), None);
    }

    #[test]
    fn key_fingerprint_equals_ssh_keygen() {
        let key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHljwaG/IIDOAyX8sBd6dFhjytL6vAi5Gh4CqwpunUqG demo";
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key.pub");
        fs::write(&path, key).unwrap();
        let printed = std::process::Command::new("ssh-keygen").arg("-lf").arg(&path).output().unwrap();
        let printed = String::from_utf8(printed.stdout).unwrap();
        assert_eq!(printed.split_whitespace().nth(1), fingerprint(key).as_deref());
        assert_eq!(fingerprint("ssh-ed25519"), None);
        assert_eq!(fingerprint("ssh-ed25519 !"), None);
    }
}
