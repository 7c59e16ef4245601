//! The bootstrap bundle of this installation (service specification, "Bootstrap bundle").
//!
//! It is the only source of what a node needs to enroll. The paths in it are those of an installed agent; a machine with other paths sets
//! flags of the agent, and does not change the bundle.

use crate::http::error::ApiError;
use crate::services::Services;
use domain::NodeId;
use secrecy::{ExposeSecret, SecretString};
use std::fmt::Write as _;
use wire::SecretToken;
use wire::bundle::env_file::quote;
use wire::bundle::{BootstrapBundle, fingerprint, names};

/// The agent's folder on an installed node, and its environment file and unit unless they are configured (`deploy/systemd`).
const AGENT_FOLDER: &str = "/var/lib/gpuaas-agent";
const ENV_FILE: &str = "/etc/gpuaas/agent.env";
const UNIT: &str = "gpuaas-agent.service";

/// The body of the script; its quoted parameters precede it.
const SCRIPT: &str = include_str!("bootstrap_bundle/bootstrap.sh");

/// The bundle that carries `token`, for the one node that the token was issued to. It is a secret from here on: its answer is not
/// stored (`Cache-Control: no-store`).
#[must_use]
pub(crate) fn bootstrap_bundle(services: &Services, node_id: NodeId, token: SecretString) -> BootstrapBundle {
    let at = |name: &str| format!("{AGENT_FOLDER}/{name}");
    let trust = &services.trust;
    BootstrapBundle {
        node_id: node_id.0,
        enrollment_token: SecretToken::new(token.expose_secret()),
        api_url: services.addresses.node_url.clone(),
        task_signing_pubkeys: trust.bundled_verifier_keys(),
        ca_bundle_path: at("ca.pem"),
        node_cert_ca_bundle_path: at("node-ca.pem"),
        cert_path: at("node.pem"),
        key_path: at("node.key"),
        ca_bundle_pem: trust.api_ca_pem.clone(),
        ca_bundle_fingerprint: fingerprint(&trust.api_ca_pem),
        package: services.package.clone(),
    }
}

/// A POSIX shell script that sets a machine up with the bundle, as often as it is run.
///
/// # Errors
/// `internal_error` where a value holds a NUL, which no file of an environment can carry.
pub(crate) fn bootstrap_script(bundle: &BootstrapBundle) -> Result<String, ApiError> {
    let (env_file, unit) = target_paths(bundle);
    let environment = bundle.to_env_file().map_err(ApiError::internal)?;
    let values = [
        ("node_id", bundle.node_id.to_string().as_str()),
        ("env_file", env_file),
        ("environment", &environment),
        ("unit", unit),
        ("ca_path", &bundle.ca_bundle_path),
        ("ca_pem", &bundle.ca_bundle_pem),
        ("ca_fingerprint", &bundle.ca_bundle_fingerprint),
        ("cert_path", &bundle.cert_path),
        ("key_path", &bundle.key_path),
    ]
    .map(|(name, value)| format!("{name}={}\n", quote(value)));
    let (first, rest) = SCRIPT.split_once('\n').unwrap_or(("", SCRIPT));
    Ok([first, "\n", &values.concat(), rest].concat())
}

/// One root shell command for the node's machine: it writes the new token into the agent's environment file, removes the existing
/// certificate and key, and restarts the agent. Each step runs only where the one before it succeeded: on a full disk, or a machine that
/// was never set up, nothing changes.
///
/// # Errors
/// `internal_error` where a value holds a NUL.
pub(crate) fn restart_command(bundle: &BootstrapBundle) -> Result<String, ApiError> {
    let (env_file, unit) = target_paths(bundle);
    let [file, new] = [env_file.to_owned(), format!("{env_file}.new")].map(|path| quote(&path));
    let token = names::ENROLLMENT_TOKEN;
    let line = quote(&format!("{token}={}", quote(bundle.enrollment_token.expose())));
    let mut steps = format!(
        "umask 077; {{ sed '/^{token}=/d' {file} && printf '%s\\n' {line}; }} >{new} && mv -f {new} {file} && "
    );
    let _ = write!(steps, "rm -f {} {} && ", quote(&bundle.cert_path), quote(&bundle.key_path));
    let _ = write!(steps, "systemctl restart {}", quote(unit));
    if steps.contains('\0') {
        return Err(ApiError::internal("a value of the bundle holds a NUL"));
    }
    Ok(format!("sh -u -c {}", quote(&steps)))
}

/// The agent's environment file and its unit: those of the package, else those of `deploy/systemd`.
fn target_paths(bundle: &BootstrapBundle) -> (&str, &str) {
    let package = &bundle.package;
    (package.env_file_path.as_deref().unwrap_or(ENV_FILE), package.systemd_unit_name.as_deref().unwrap_or(UNIT))
}

#[cfg(test)]
mod tests;
