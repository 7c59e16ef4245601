//! `gpuctl ssh`: runs the user's own ssh with the address and the host key of the allocation. The host key is pinned: the key that the
//! host offers is compared with the fingerprint from the API, which came over TLS, and written to a known-hosts file of this allocation
//! alone.

use crate::Connection;
use crate::allocations;
use crate::completion;
use crate::failure::{ExitStatus, Failure};
use crate::login::login_store::write_private;
use crate::resource_ref::{self, ALLOCATION, Ref};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long a new tenant's SSH access may take to appear on the node.
const HOST_KEY_TIMEOUT: Duration = Duration::from_secs(20);
const SCAN_INTERVAL: Duration = Duration::from_millis(500);
/// The longest output of a host key scan.
const MAX_SCAN_BYTES: usize = 64 * 1024;

#[derive(Debug, clap::Args)]
pub(crate) struct SshArgs {
    #[arg(add = completion::of(&ALLOCATION))]
    allocation: Ref,
    /// The private key to log in with, as for `ssh -i`.
    #[arg(long, short, value_name = "FILE")]
    identity: Option<PathBuf>,
    /// Pass this argument to ssh; may be given again: --ssh-arg=-L8080:localhost:8080.
    #[arg(long = "ssh-arg", value_name = "ARG", allow_hyphen_values = true)]
    ssh_args: Vec<OsString>,
    /// Print a Host block for ~/.ssh/config, for scp, rsync and editors, and connect nowhere.
    #[arg(long)]
    print_config: bool,
    /// Accept any host key if the service does not know the host's key.
    #[arg(long)]
    accept_unknown_host_key: bool,
    /// The command to run there; a login shell by default.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// The SSH address of an allocation, and its host key.
struct SshTarget {
    host: String,
    port: u16,
    user: String,
    fingerprint: Option<String>,
}

pub(crate) async fn run(args: SshArgs, connection: &Connection) -> Result<u8, Failure> {
    let api = connection.api()?;
    let allocation = resource_ref::allocation(&args.allocation, &api).await?;
    let found = api.get(&allocations::path(allocation), &[]).await?;
    let target = SshTarget::of(&found)?;
    let known = connection.store.known_hosts()?.join(allocation.to_string());
    let alias = format!("gpu-{allocation}");
    let checked = match &target.fingerprint {
        Some(fingerprint) => {
            pin(&target, fingerprint, &alias, &known)?;
            "yes"
        }
        None if args.accept_unknown_host_key => "accept-new",
        None => return Err(without_host_key(allocation)),
    };
    if args.print_config {
        // The block is used from another folder, so the path must be absolute.
        let identity = args.identity.map(|path| std::path::absolute(&path).unwrap_or(path));
        connection.out.line(&target.config(&alias, &known, checked, identity.as_deref()))?;
        return Ok(0);
    }
    let mut ssh = Command::new("ssh");
    for option in target.options(&alias, &known, checked) {
        ssh.args(["-o", &option]);
    }
    if let Some(identity) = &args.identity {
        ssh.arg("-i").arg(identity);
    }
    ssh.args(&args.ssh_args).args(["-p", &target.port.to_string(), "-l", &target.user, "--", &target.host]);
    ssh.args(&args.command);
    // Replaces this process, so that the terminal, the signals and the exit status are ssh's.
    let error = ssh.exec();
    Err(Failure::new(ExitStatus::Failed, format!("ssh cannot be run: {error}")).next("Install an OpenSSH client."))
}

impl SshTarget {
    fn of(allocation: &Value) -> Result<Self, Failure> {
        let state = allocation["state"].as_str().unwrap_or_default();
        let ssh = &allocation["ssh"];
        if state != "active" || ssh.is_null() {
            return Err(Failure::new(
                ExitStatus::Refused,
                format!("the allocation is {state}; only an active one can be logged in to"),
            )
            .next(match (state, allocation["id"].as_str()) {
                ("requested" | "provisioning", Some(id)) => {
                    format!("Wait for it: gpuctl allocations events {id} --follow")
                }
                _ => "gpuctl allocations list shows those that are active.".to_owned(),
            }));
        }
        let text = |name: &str| ssh[name].as_str().filter(|text| is_name(text)).map(str::to_owned);
        let port = ssh["port"].as_u64().and_then(|port| u16::try_from(port).ok());
        let (Some(host), Some(port), Some(user)) = (text("host"), port, text("username")) else {
            return Err(Failure::unusable_answer("the server's answer names no host, port and user to log in to"));
        };
        Ok(Self { host, port, user, fingerprint: ssh["host_key_fingerprint"].as_str().map(str::to_owned) })
    }

    fn options(&self, alias: &str, known: &Path, checked: &str) -> [String; 6] {
        [
            format!("HostKeyAlias={alias}"),
            format!("UserKnownHostsFile=\"{}\"", known.display()),
            "GlobalKnownHostsFile=/dev/null".to_owned(),
            format!("StrictHostKeyChecking={checked}"),
            // The service alone decides on the host's keys.
            "UpdateHostKeys=no".to_owned(),
            "CheckHostIP=no".to_owned(),
        ]
    }

    fn config(&self, alias: &str, known: &Path, checked: &str, identity: Option<&Path>) -> String {
        let mut lines = vec![
            format!("Host {alias}"),
            format!("  HostName {}", self.host),
            format!("  Port {}", self.port),
            format!("  User {}", self.user),
        ];
        lines.extend(identity.map(|path| format!("  IdentityFile \"{}\"", path.display())));
        lines.extend(
            self.options(alias, known, checked).iter().map(|option| format!("  {}", option.replacen('=', " ", 1))),
        );
        lines.join("\n")
    }
}

/// An agent that admits tenants by SSH reports the host key; one that keeps them in its sandbox has none.
fn without_host_key(allocation: Uuid) -> Failure {
    Failure::new(
        ExitStatus::Refused,
        "this node's agent has reported no SSH host key: an agent that runs tenants in its sandbox admits none by SSH",
    )
    .next(format!(
        "Open a terminal: gpuctl terminal {allocation}. Only where the operator says that the node has an SSH server, compare its key \
         yourself when ssh shows it: --accept-unknown-host-key"
    ))
}

/// Whether a text is a valid host or user, and cannot be taken for an option, a command or a second argument of ssh.
fn is_name(text: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    !text.is_empty() && text.len() <= 255 && !text.starts_with('-') && text.chars().all(good)
}

/// Writes to `known` the host's key with this fingerprint.
fn pin(target: &SshTarget, fingerprint: &str, alias: &str, known: &Path) -> Result<(), Failure> {
    let before = std::fs::read_to_string(known).unwrap_or_default();
    if matching(&before, fingerprint).is_some() {
        return Ok(());
    }
    let until = Instant::now() + HOST_KEY_TIMEOUT;
    loop {
        let offered = scan(target)?;
        if let Some((kind, key)) = matching(&offered, fingerprint) {
            let line = format!("{alias} {kind} {key}\n");
            return write_private(known, line.as_bytes())
                .map_err(|error| Failure::new(ExitStatus::Failed, format!("{}: {error}", known.display())));
        }
        let SshTarget { host, port, .. } = target;
        if !offered.is_empty() {
            return Err(Failure::new(
                ExitStatus::Refused,
                format!(
                    "{host} port {port} has none but other host keys than {fingerprint}, which the \
                 service names: a third party may be intercepting the connection, and nothing was sent"
                ),
            )
            .next("Tell the service's operator."));
        }
        if Instant::now() >= until {
            return Err(Failure::new(
                ExitStatus::Network,
                format!("{host} port {port} does not answer as an SSH server"),
            )
            .next(
                "Ask the operator whether the node can be reached from here; `gpuctl terminal` needs no way to it.",
            ));
        }
        std::thread::sleep(SCAN_INTERVAL);
    }
}

/// The host keys that the host offers: lines of `host type key`. Empty where it does not respond.
fn scan(target: &SshTarget) -> Result<String, Failure> {
    let mut scan = Command::new("ssh-keyscan");
    scan.args(["-T", "5", "-t", "ed25519,ecdsa,rsa", "-p", &target.port.to_string(), "--", &target.host]);
    let ran = scan.stdin(Stdio::null()).stderr(Stdio::null()).output();
    let ran = ran.map_err(|error| {
        Failure::new(ExitStatus::Failed, format!("ssh-keyscan cannot be run: {error}"))
            .next("Install an OpenSSH client.")
    })?;
    let mut scanned = ran.stdout;
    scanned.truncate(MAX_SCAN_BYTES);
    Ok(String::from_utf8_lossy(&scanned).lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n"))
}

/// The type and the body of the first key with the fingerprint.
fn matching(lines: &str, fingerprint: &str) -> Option<(String, String)> {
    lines.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (kind, key) = (words.next()?, words.next()?);
        let body = STANDARD.decode(key).ok()?;
        let its = format!("SHA256:{}", STANDARD_NO_PAD.encode(Sha256::digest(&body)));
        (its == fingerprint && is_name(kind)).then(|| (kind.to_owned(), key.to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const KEY: &str = "AAAAC3NzaC1lZDI1NTE5AAAAIHljwaG/IIDOAyX8sBd6dFhjytL6vAi5Gh4CqwpunUqG";
    const OTHER: &str = "AAAAC3NzaC1lZDI1NTE5AAAAIEh4Vt1cYd4nGOsaNHWfOKTtQ8Z9zRl2Wuy1Jr4YF4aV";

    fn fingerprint() -> String {
        format!("SHA256:{}", STANDARD_NO_PAD.encode(Sha256::digest(STANDARD.decode(KEY).unwrap())))
    }

    #[test]
    fn only_the_host_key_with_the_fingerprint_is_accepted() {
        let offered = format!("h ssh-rsa not-base64!\n[h]:22 ssh-ed25519 {OTHER}\n[h]:22 ssh-ed25519 {KEY}\n");
        assert_eq!(matching(&offered, &fingerprint()), Some(("ssh-ed25519".to_owned(), KEY.to_owned())));
        assert_eq!(matching(&format!("h ssh-ed25519 {OTHER}"), &fingerprint()), None);
        assert_eq!(matching("", &fingerprint()), None);
    }

    #[test]
    fn host_or_user_that_could_be_an_option_is_refused() {
        let target = |host: &str, username: &str| {
            SshTarget::of(&json!({ "state": "active", "ssh": { "host": host, "port": 22, "username": username } }))
        };
        assert!(target("gpu-1.example", "u-01").is_ok() && target("::1", "u").is_ok());
        for (host, user) in [
            ("-oProxyCommand=touch /tmp/owned", "u"),
            ("h", "-oProxyCommand=x"),
            ("h;reboot", "u"),
            ("h\nProxyCommand x", "u"),
            ("$(reboot)", "u"),
            ("", "u"),
            ("h", "a b"),
        ] {
            assert_eq!(
                target(host, user).err().map(|failure| failure.exit_status),
                Some(ExitStatus::Server),
                "{host:?} {user:?}"
            );
        }
        let early = SshTarget::of(&json!({ "state": "provisioning", "ssh": null }));
        assert_eq!(early.err().map(|failure| failure.exit_status), Some(ExitStatus::Refused));
    }

    #[test]
    fn node_without_a_host_key_is_entered_by_a_terminal() {
        let id = Uuid::from_u128(7);
        let failure = without_host_key(id);
        assert_eq!(failure.exit_status, ExitStatus::Refused);
        assert!(failure.next.unwrap().starts_with(&format!("Open a terminal: gpuctl terminal {id}.")));
    }

    #[test]
    fn config_block_has_the_options_of_the_command_line() {
        let target = SshTarget { host: "gpu-1.example".into(), port: 2222, user: "u-01".into(), fingerprint: None };
        insta::assert_snapshot!(target.config("gpu-x", Path::new("/k/x"), "yes", Some(Path::new("/id"))), @r#"
        Host gpu-x
          HostName gpu-1.example
          Port 2222
          User u-01
          IdentityFile "/id"
          HostKeyAlias gpu-x
          UserKnownHostsFile "/k/x"
          GlobalKnownHostsFile /dev/null
          StrictHostKeyChecking yes
          UpdateHostKeys no
          CheckHostIP no
        "#);
    }
}
