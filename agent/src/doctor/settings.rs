//! The agent's settings, its files and its certificates.

use super::variable;
use crate::config::{AgentConfig, AgentConfigError, Flags, OWN_VARIABLES};
use crate::identity::{AgentIdentity, IdentityStore};
use crate::server_clock::ServerClock;
use chrono::{DateTime, TimeDelta, Utc};
use clap::CommandFactory as _;
use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use telemetry::diagnosis::{DiagnosticFinding, machine};
use wire::bundle::{Variables, names};

/// Authorities live for years.
const ENDS_SOON: TimeDelta = TimeDelta::days(14);

/// The variables of the programs beside the agent, in the same file.
const OTHER_PREFIXES: [&str; 3] = ["SVC_NODE_LOG_COLLECTOR_", "SVC_TELEMETRY_EDGE_", "SVC_NODE_AGENT_PACKAGE_"];

const BUNDLE: &str = "take it from the node's bootstrap bundle; an administrator reissues it: gpuctl nodes script NODE";

pub(super) fn examine(flags: &Flags) -> Vec<DiagnosticFinding> {
    let source = match &flags.env_file {
        Some(file) => format!("{} and the environment", file.display()),
        None => "the environment and the flags".to_owned(),
    };
    let mut findings = match AgentConfig::peek(flags, variable) {
        Ok(config) => {
            let summary = format!("settings from {source}: node {} at {}", config.node_id, config.api_url);
            vec![DiagnosticFinding::ok(summary)]
        }
        Err(AgentConfigError::Several(problems)) => problems.iter().map(problem).collect(),
        Err(error) => vec![problem(&error)],
    };
    let text = flags.env_file.as_deref().and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
    findings.extend(unknown(&text));
    findings
}

fn problem(error: &AgentConfigError) -> DiagnosticFinding {
    DiagnosticFinding::error(crate::chain(error), BUNDLE)
}

/// Names in the file that no program of the node reads.
fn unknown(text: &str) -> Vec<DiagnosticFinding> {
    if Variables::parse(text).is_err() {
        // Among the problems already.
        return Vec::new();
    }
    let command = Flags::command();
    let flags = command.get_arguments().filter_map(|argument| argument.get_env()?.to_str().map(str::to_owned));
    let bundle = [
        names::NODE_ID,
        names::ENROLLMENT_TOKEN,
        names::API_URL,
        names::TASK_SIGNING_PUBKEYS,
        names::CA_BUNDLE_PATH,
        names::NODE_CERT_CA_BUNDLE_PATH,
        names::CERT_PATH,
        names::KEY_PATH,
        names::CA_BUNDLE_PEM,
        names::CA_BUNDLE_FINGERPRINT,
        names::INSTALL_ROOT,
        names::ENV_FILE,
        names::SYSTEMD_UNIT,
        "SVC_HOST_ROLE",
        "SVC_HOST_NAME",
        "SVC_LAB_STACK",
    ];
    let known: BTreeSet<String> = flags.chain(bundle.into_iter().chain(OWN_VARIABLES).map(str::to_owned)).collect();
    let names = text.lines().filter_map(|line| Some(line.split_once('=')?.0.trim()));
    let ours = names.filter(|name| {
        name.starts_with("SVC_") && !name.contains(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_')
    });
    let is_unknown =
        |name: &&str| !known.contains(*name) && !OTHER_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    ours.filter(is_unknown)
        .map(|name| {
            DiagnosticFinding::warning(
                format!("{name} is no variable of the agent"),
                "correct its name, or remove it; see Configuration",
            )
        })
        .collect()
}

pub(super) fn examine_files(flags: &Flags) -> Vec<DiagnosticFinding> {
    let mut findings = Vec::new();
    findings.extend(flags.env_file.as_deref().and_then(|file| machine::secret_file("the environment file", file)));
    if let Ok(config) = AgentConfig::peek(flags, variable) {
        if config.key_path.exists() {
            findings.extend(machine::secret_file(names::KEY_PATH, &config.key_path));
        }
        findings.push(state_folder(&config.state_dir));
    }
    if findings.is_empty() {
        findings.push(DiagnosticFinding::ok("files with secrets are readable by their owner alone"));
    }
    findings
}

fn state_folder(folder: &Path) -> DiagnosticFinding {
    let at = folder.display();
    let user = nix::unistd::Uid::effective();
    match std::fs::metadata(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            DiagnosticFinding::ok(format!("the state's folder {at} does not exist; the first start makes it"))
        }
        Err(error) => {
            DiagnosticFinding::error(format!("the state's folder {at} cannot be read: {error}"), "run this as root")
        }
        Ok(found) if !found.is_dir() => {
            DiagnosticFinding::error(format!("{at} is no folder"), "move it away, or name another one with --state-dir")
        }
        Ok(found) if found.permissions().mode() & 0o077 != 0 => DiagnosticFinding::warning(
            format!("the state's folder {at} is open to others (mode {:03o})", found.permissions().mode() & 0o777),
            format!("chmod 700 {at}: the journal and the node's key are in it"),
        ),
        Ok(found) if !user.is_root() && found.uid() != user.as_raw() => DiagnosticFinding::warning(
            format!("the state's folder {at} belongs to another user (uid {})", found.uid()),
            "run this as the agent's user or as root",
        ),
        Ok(_) => DiagnosticFinding::ok(format!("the state's folder {at} belongs to the agent alone")),
    }
}

pub(super) fn certificates(flags: &Flags) -> Vec<DiagnosticFinding> {
    let Ok(config) = AgentConfig::peek(flags, variable) else {
        return vec![DiagnosticFinding::warning("not looked at: the settings are incomplete", "correct them first")];
    };
    let now = ServerClock::peek(&config.state_dir, config.node_id).now();
    let has_token = config.enrollment_token.is_some();
    let mut findings = vec![match IdentityStore::new(&config).peek() {
        Ok(identity) => judge_identity(identity.as_ref(), has_token, now),
        Err(error) => DiagnosticFinding::error(
            crate::chain(&error),
            "stop the agent, and ask an administrator to reissue the node's enrollment: gpuctl nodes script NODE",
        ),
    }];
    findings.push(judge_authorities(&authorities(&config.ca_bundle_pem), now));
    findings
}

fn judge_identity(identity: Option<&AgentIdentity>, has_token: bool, now: DateTime<Utc>) -> DiagnosticFinding {
    let reissue = "ask an administrator to reissue the node's enrollment: gpuctl nodes script NODE";
    let Some(identity) = identity else {
        return match has_token {
            true => DiagnosticFinding::ok("the node is not enrolled; the first start enrolls it with its token"),
            false => DiagnosticFinding::error("the node is not enrolled, and has no enrollment token", reissue),
        };
    };
    let ends = identity.not_after.format("%Y-%m-%d %H:%M UTC");
    if identity.is_expired(now) {
        return DiagnosticFinding::error(
            format!("the node's certificate ended at {ends}"),
            format!("start the agent: it recovers with its key within the grace of the policy; otherwise {reissue}"),
        );
    }
    if !identity.is_in_force(now) {
        let begins = identity.not_before.format("%Y-%m-%d %H:%M UTC");
        return DiagnosticFinding::error(
            format!("the node's certificate is valid from {begins} on, which is in the future"),
            "set this machine's clock by a time service (chrony or systemd-timesyncd)",
        );
    }
    // The agent renews by 60 % of its life.
    let (life, left) = (identity.not_after - identity.not_before, identity.not_after - now);
    if left < life / 5 {
        return DiagnosticFinding::warning(
            format!("the node's certificate ends at {ends}, and was not renewed"),
            "look at the agent's log for `renew`, and whether the control plane answers",
        );
    }
    DiagnosticFinding::ok(format!("the node's certificate ends at {ends}; the agent renews it"))
}

/// The ends of the certificates of a bundle.
fn authorities(pem: &str) -> Vec<DateTime<Utc>> {
    x509_parser::pem::Pem::iter_from_buffer(pem.as_bytes())
        .filter_map(|pem| {
            let pem = pem.ok()?;
            DateTime::from_timestamp(pem.parse_x509().ok()?.validity().not_after.timestamp(), 0)
        })
        .collect()
}

fn judge_authorities(ends: &[DateTime<Utc>], now: DateTime<Utc>) -> DiagnosticFinding {
    let Some(last) = ends.iter().max() else {
        return DiagnosticFinding::error("the bundle of authorities has no certificate", BUNDLE);
    };
    let shown = last.format("%Y-%m-%d");
    if *last <= now {
        return DiagnosticFinding::error(format!("the authorities of the control plane ended at {shown}"), BUNDLE);
    }
    if *last - now < ENDS_SOON {
        let summary = format!("the last authority of the control plane ends at {shown}");
        return DiagnosticFinding::warning(summary, "have the bundle reissued with the next authority before");
    }
    DiagnosticFinding::ok(format!("authorities of the control plane: {}, the last one ends at {shown}", ends.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use telemetry::diagnosis::DiagnosticLevel;

    fn now() -> DateTime<Utc> {
        DateTime::from_timestamp(1_800_000_000, 0).unwrap()
    }

    fn identity(from_hours: i64, to_hours: i64) -> AgentIdentity {
        AgentIdentity {
            certificate_chain_pem: String::new(),
            key_pem: String::new().into(),
            not_before: now() + TimeDelta::hours(from_hours),
            not_after: now() + TimeDelta::hours(to_hours),
            authority: None,
            taken_at: None,
        }
    }

    #[test]
    fn certificate_of_the_node_is_judged_by_its_end_and_its_renewal() {
        let judge = |from, to| judge_identity(Some(&identity(from, to)), false, now()).level;
        assert_eq!(judge(-10, 14), DiagnosticLevel::Ok);
        assert_eq!(judge(-22, 2), DiagnosticLevel::Warning, "it should be renewed");
        assert_eq!(judge(-24, 0), DiagnosticLevel::Error);
        assert_eq!(judge(1, 24), DiagnosticLevel::Error, "the clock is behind");
        assert_eq!(judge_identity(None, true, now()).level, DiagnosticLevel::Ok);
        assert_eq!(judge_identity(None, false, now()).level, DiagnosticLevel::Error);
        assert_eq!(judge_authorities(&[], now()).level, DiagnosticLevel::Error);
        assert_eq!(judge_authorities(&[now() + TimeDelta::days(3)], now()).level, DiagnosticLevel::Warning);
    }

    #[test]
    fn misspelled_variable_of_the_file_is_named() {
        let text = "SVC_NODE_ID='x'\nSVC_NODE_AGENT_EXECUTER='system'\nSVC_NODE_LOG_COLLECTOR_ENABLED='1'\nOTHER='x'\n";
        let found = unknown(text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].summary.starts_with("SVC_NODE_AGENT_EXECUTER is no variable"), "{found:?}");
    }
}
