//! The bootstrap bundle of this installation (service specification, "Bootstrap bundle").
//!
//! It is the only source of what a node needs to enroll. The paths in it are those of an installed agent; a machine with other paths sets
//! flags of the agent, and does not change the bundle.

use crate::agent_package::FirstProgram;
use crate::app_state::AppState;
use crate::http::error::ApiError;
use domain::NodeId;
use secrecy::{ExposeSecret, SecretString};
use std::fmt::Write as _;
use wire::SecretToken;
use wire::bundle::env_file::quote;
use wire::bundle::{BootstrapBundle, fingerprint, names};
use wire::package::{DEFAULT_ENV_FILE, DEFAULT_INSTALL_ROOT, DEFAULT_UNIT};

/// The agent's folder on an installed node (`deploy/systemd`).
const AGENT_FOLDER: &str = "/var/lib/gpuaas-agent";

/// The bodies of the scripts; their quoted parameters precede them.
const SCRIPT: &str = include_str!("bootstrap_bundle/bootstrap.sh");
const PACKAGE_SCRIPT: &str = include_str!("bootstrap_bundle/package.sh");
/// Ends the first program in a script; no line of base64 is this one.
const END_OF_PROGRAM: &str = "END-OF-THE-FIRST-PROGRAM";

/// The largest script with the package, in bytes: a first program, and a bundle.
pub(in crate::api) const PACKAGE_SCRIPT_BYTES: usize = 6 * 1024 * 1024;

/// The bundle that carries `token`, for the one node that the token was issued to. It is a secret from here on: its answer is not
/// stored (`Cache-Control: no-store`).
#[must_use]
pub(crate) fn bootstrap_bundle(app: &AppState, node_id: NodeId, token: SecretString) -> BootstrapBundle {
    let at = |name: &str| format!("{AGENT_FOLDER}/{name}");
    let trust = &app.trust;
    BootstrapBundle {
        node_id: node_id.0,
        enrollment_token: SecretToken::new(token.expose_secret()),
        api_url: app.addresses.node_url.clone(),
        task_signing_pubkeys: trust.bundled_verifier_keys(),
        ca_bundle_path: at("ca.pem"),
        node_cert_ca_bundle_path: at("node-ca.pem"),
        cert_path: at("node.pem"),
        key_path: at("node.key"),
        ca_bundle_pem: trust.api_ca_pem.clone(),
        ca_bundle_fingerprint: fingerprint(&trust.api_ca_pem),
        package: app.agent_package.bundled.clone(),
    }
}

/// A POSIX shell script that sets a machine up with the bundle, as often as it is run.
///
/// # Errors
/// `internal_error` where a value holds a NUL, which no file of an environment can carry.
pub(crate) fn bootstrap_script(bundle: &BootstrapBundle) -> Result<String, ApiError> {
    Ok(with_parameters(SCRIPT, &parameters(bundle)?))
}

/// A POSIX shell script that also installs the package, on a machine that has nothing but systemd and coreutils.
///
/// # Errors
/// `internal_error` where a value holds a NUL, or the script would be larger than [`PACKAGE_SCRIPT_BYTES`].
pub(crate) fn package_script(bundle: &BootstrapBundle, program: &FirstProgram) -> Result<String, ApiError> {
    let install_root = bundle.package.install_root.as_deref().unwrap_or(DEFAULT_INSTALL_ROOT);
    let mut before = parameters(bundle)?;
    let more =
        [("install_root", install_root), ("machine", program.machine), ("first_program_sha256", &program.sha256)];
    before.push_str(&more.map(parameter).concat());
    let _ =
        write!(before, "first_program() {{\n    cat <<'{END_OF_PROGRAM}'\n{}{END_OF_PROGRAM}\n}}\n", program.encoded);
    let script = with_parameters(PACKAGE_SCRIPT, &before);
    if script.len() > PACKAGE_SCRIPT_BYTES || install_root.contains('\0') {
        return Err(ApiError::internal("the script is too large, or its folder holds a NUL"));
    }
    Ok(script)
}

/// The parameters of both scripts.
fn parameters(bundle: &BootstrapBundle) -> Result<String, ApiError> {
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
    .map(parameter);
    Ok(values.concat())
}

fn parameter((name, value): (&str, &str)) -> String {
    format!("{name}={}\n", quote(value))
}

/// The script with its parameters below its first line.
fn with_parameters(script: &str, parameters: &str) -> String {
    let (first, rest) = script.split_once('\n').unwrap_or(("", script));
    [first, "\n", parameters, rest].concat()
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
    (
        package.env_file_path.as_deref().unwrap_or(DEFAULT_ENV_FILE),
        package.systemd_unit_name.as_deref().unwrap_or(DEFAULT_UNIT),
    )
}

#[cfg(test)]
mod tests;
