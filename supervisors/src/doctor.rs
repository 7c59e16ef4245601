//! `gpuaas doctor`: looks at everything that a replica needs, and says what to do about what is wrong. It changes nothing, and what hangs is
//! a finding.

mod access_token;
mod certificates;
mod host;
pub(crate) mod nats;
mod outside_services;
mod postgres;
mod service;
mod settings;

use crate::config::installed_settings::InstalledSettings;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use telemetry::diagnosis::{DiagnosticCheck, DiagnosticReport, examine};

/// The settings, and the form of the result.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// The environment file of the service. Without it: that of the Debian package, /etc/gpuaas/gpuaas.env, unless this command's environment
    /// has SVC_DATABASE_URL. What the file does not set is taken from the environment; kek, tls.pem and tls.key beside it are taken as the
    /// unit passes them.
    #[arg(long, value_name = "FILE")]
    env_file: Option<PathBuf>,
    /// A file with an access token of the identity provider: with it the check `access-token` says how this service reads it, or which claim and
    /// setting refuse it.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t)]
    output: DoctorOutput,
    /// One check alone.
    #[arg(long, hide = true)]
    only: Option<String>,
}

/// How findings are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum DoctorOutput {
    #[default]
    Text,
    Json,
}

/// A wait for a local resource.
const LOCAL: Duration = Duration::from_secs(5);
/// A connection, and a few requests.
const REMOTE: Duration = Duration::from_secs(15);

/// What to do where a server does not answer within that.
const NETWORK: &str =
    "it accepts connections and does not answer: look at its log and its load, restart it if it hangs";

/// Prints the findings, and returns 0 where nothing is wrong, 1 for warnings, 2 for errors.
///
/// # Errors
/// Where standard output cannot be written to.
pub async fn run(args: DoctorArgs) -> anyhow::Result<ExitCode> {
    let settings = InstalledSettings::open(args.env_file.as_deref());
    let report = examined(settings, args.token_file, args.only).await?;
    let mut out = std::io::stdout().lock();
    match args.output {
        DoctorOutput::Text => write!(out, "{}", report.as_text())?,
        DoctorOutput::Json => writeln!(out, "{:#}", report.as_json())?,
    }
    Ok(ExitCode::from(report.level() as u8))
}

/// Runs all checks, within the longest of their limits; with a file that has an access token, that of the token, too.
///
/// # Errors
/// Where no thread can be started.
pub async fn diagnose(settings: InstalledSettings, token_file: Option<PathBuf>) -> anyhow::Result<DiagnosticReport> {
    examined(settings, token_file, None).await
}

async fn examined(
    settings: InstalledSettings,
    token_file: Option<PathBuf>,
    only: Option<String>,
) -> anyhow::Result<DiagnosticReport> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let settings = Arc::new(settings);
    let mut checks = checks(Arc::clone(&settings));
    checks.extend(token_file.map(|file| {
        let examination = access_token::examine(settings, file);
        DiagnosticCheck::new("access-token", "how a token is read", REMOTE, NETWORK, examination)
    }));
    if let Some(only) = only {
        checks.retain(|check| check.name() == only);
    }
    std::thread::Builder::new().spawn(move || {
        let _ = sender.send(examine("gpuaas", env!("CARGO_PKG_VERSION"), checks));
    })?;
    Ok(receiver.await?)
}

/// The table of checks.
fn checks(settings: Arc<InstalledSettings>) -> Vec<DiagnosticCheck> {
    const DISK: &str = "a file system does not answer: look for a dead network mount in the paths of the settings";
    let local = |name, subject, look: fn(&InstalledSettings) -> Vec<_>| {
        let settings = Arc::clone(&settings);
        DiagnosticCheck::blocking(name, subject, LOCAL, DISK, move || look(&settings))
    };
    let remote = |name, subject, look: DiagnosticCheckOf| {
        DiagnosticCheck::new(name, subject, REMOTE, NETWORK, look(Arc::clone(&settings)))
    };
    vec![
        local("settings", "the environment file and all variables", settings::examine),
        remote("service", "whether it runs and is ready, and its unit", |it| Box::pin(service::examine(it))),
        local("files", "who may read the files with secrets", settings::examine_files),
        local("certificates", "the certificates that settings name, and their ends", certificates::examine),
        remote("presented-certificates", "the certificate that the running listeners present", |it| {
            Box::pin(certificates::examine_presented(it))
        }),
        remote("postgres", "connection, clock, durability, standbys, schema, key ring", |it| {
            Box::pin(postgres::examine(it))
        }),
        remote("nats", "connection, JetStream, streams, clock, permissions", |it| Box::pin(nats::examine(it))),
        remote("identity", "the identity provider's discovery document and keys", |it| {
            Box::pin(outside_services::identity_provider(it))
        }),
        remote("payments", "the payment processor", |it| Box::pin(outside_services::payment_processor(it))),
        remote("mail", "the mail server", |it| Box::pin(outside_services::mail_server(it))),
        remote("bare-metal", "the bare-metal provider", |it| Box::pin(outside_services::bare_metal_provider(it))),
        remote("log-store", "the store of nodes' logs", |it| Box::pin(outside_services::log_store(it))),
        remote("alertmanager", "the Alertmanager", |it| Box::pin(outside_services::alertmanager(it))),
        local("ports", "the addresses of the listeners", host::ports),
        local("open-files", "the limit of open files", host::open_files),
        local("disks", "the file systems of this machine", host::disks),
    ]
}

type DiagnosticCheckOf =
    fn(Arc<InstalledSettings>) -> futures::future::BoxFuture<'static, Vec<telemetry::diagnosis::DiagnosticFinding>>;
