//! `systemctl reload` (SIGHUP): a running process takes a renewed certificate, another user or password of the database, and another filter
//! of its logs, and closes no connection. What cannot be used is refused, and what was in use stays in use.
//!
//! A unit's credentials and environment file are root's, and systemd hands them over at the start alone. So the unit's `ExecReload=` puts copies
//! into its runtime folder before it sends the signal; a file there goes before the one of the settings.

use crate::config::{ConfigError, env_file, settings_table};
use crate::logging::LogFilter;
use crate::service_manager::SystemdNotifier;
use crate::startup::Stages;
use crate::startup::listener_certificate::ListenerCertificate;
use crate::startup::storage::database;
use crate::workers::WorkerDependencies;
use anyhow::{Context, bail};
use chrono::Utc;
use prometheus::{IntGaugeVec, Opts, Registry};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The copy of the environment file.
const ENV_FILE: &str = "gpuaas.env";
/// What was refused; empty where nothing was.
const RESULT_FILE: &str = "reload-result";
const DATABASE: &str = "SVC_DATABASE_URL";
const LOG_FILTER: &str = "RUST_LOG";

/// What is reloaded, by the label of the metric.
const CERTIFICATE_PART: &str = "certificate";
const DATABASE_PART: &str = "database";
const LOG_PART: &str = "logs";

/// The assignments of the environment file.
type Settings = BTreeMap<String, String>;

/// Reloads at each SIGHUP.
pub struct Reloader {
    workers: Arc<WorkerDependencies>,
    log_filter: LogFilter,
    folder: Option<PathBuf>,
    refused: IntGaugeVec,
}

/// The signals, taken from the beginning: one that is not taken ends the process.
///
/// # Errors
/// Where the signal cannot be taken.
pub fn hangups() -> std::io::Result<Signal> {
    signal(SignalKind::hangup())
}

impl Reloader {
    /// # Errors
    /// Where the registry has a metric of its name.
    pub fn new(
        workers: Arc<WorkerDependencies>,
        log_filter: LogFilter,
        registry: &Registry,
    ) -> Result<Self, prometheus::Error> {
        let refused = IntGaugeVec::new(
            Opts::new(
                "settings_reload_refused",
                "1 where the last reload of a part could not be used, and what was in use stays: the certificate of the listeners, the \
                 database's user and password, the filter of the logs.",
            ),
            &["part"],
        )?;
        for part in [CERTIFICATE_PART, DATABASE_PART, LOG_PART] {
            refused.with_label_values(&[part]).set(0);
        }
        registry.register(Box::new(refused.clone()))?;
        Ok(Self { workers, log_filter, folder: runtime_folder(std::env::var_os("RUNTIME_DIRECTORY")), refused })
    }

    /// Runs until the process ends.
    pub async fn run(self, mut hangups: Signal, manager: SystemdNotifier) {
        while hangups.recv().await.is_some() {
            let refused = self.reload().await;
            let result = match refused.as_slice() {
                [] => String::new(),
                parts => format!("refused, and as it was before: {}", parts.join(", ")),
            };
            manager.notify_status(if result.is_empty() { "reloaded" } else { &result });
            if let Some(folder) = &self.folder {
                write_result(folder, &result);
            }
        }
    }

    /// Reloads all parts, and returns those that were refused.
    async fn reload(&self) -> Vec<&'static str> {
        let settings = self.settings();
        let database = match &settings {
            Ok(settings) => self.reload_database(settings).await,
            Err(error) => Err(anyhow::anyhow!("{error:#}")),
        };
        let logs = settings.and_then(|settings| self.reload_log_filter(&settings));
        let parts = [(CERTIFICATE_PART, self.reload_certificate().await), (DATABASE_PART, database), (LOG_PART, logs)];
        let mut refused = Vec::new();
        for (part, reloaded) in parts {
            self.refused.with_label_values(&[part]).set(i64::from(reloaded.is_err()));
            match reloaded {
                Ok(()) => tracing::info!(part, "reloaded"),
                Err(error) => {
                    tracing::error!(part, error = format!("{error:#}"), "the reload is refused; what was in use stays");
                    refused.push(part);
                }
            }
        }
        refused
    }

    fn stages(&self) -> &Stages {
        &self.workers.stages
    }

    async fn reload_certificate(&self) -> anyhow::Result<()> {
        let Stages { config, listeners, services, .. } = self.stages();
        let certificate =
            ListenerCertificate::read(&self.newest(&config.tls_cert), &self.newest(&config.tls_key)).await?;
        if certificate.end <= Utc::now() {
            bail!("SVC_TLS_CERT_PATH: a certificate of the chain has ended at {}", certificate.end);
        }
        listeners.present(&certificate).context("SVC_TLS_CERT_PATH, SVC_TLS_KEY_PATH")?;
        services.operator_view.metrics.entity_totals.set_server_certificate_end(certificate.end);
        Ok(())
    }

    async fn reload_database(&self, settings: &Settings) -> anyhow::Result<()> {
        let Some(url) = settings.get(DATABASE).filter(|url| !url.trim().is_empty()) else { return Ok(()) };
        let Stages { config, storage, .. } = self.stages();
        let current = database(config);
        let mut renewed = current.clone();
        renewed.url = url.clone().into();
        persistence::pool::renew_credentials(&storage.pool, &current, &renewed).await.context(DATABASE)
    }

    /// A file without the setting changes nothing: the filter may come from elsewhere in the unit.
    fn reload_log_filter(&self, settings: &Settings) -> anyhow::Result<()> {
        settings.get(LOG_FILTER).map_or(Ok(()), |filter| self.log_filter.replace(filter))
    }

    /// The settings of the environment file; none where there is no copy of it.
    fn settings(&self) -> anyhow::Result<Settings> {
        let Some(path) = self.folder.as_ref().map(|folder| folder.join(ENV_FILE)).filter(|path| path.exists()) else {
            return Ok(Settings::new());
        };
        let text = env_file::read(&path)?;
        let file = env_file::EnvFile::parse(&text);
        if !file.problems.is_empty() {
            return Err(ConfigError { problems: file.problems }.into());
        }
        let settings = file.values;
        let waiting = wait_for_a_restart(&settings, |name| std::env::var(name).ok());
        if !waiting.is_empty() {
            tracing::warn!(
                settings = waiting.join(", "),
                "changed settings that a reload does not take wait for a restart"
            );
        }
        Ok(settings)
    }

    /// The copy of a file, where there is one.
    fn newest(&self, path: &Path) -> PathBuf {
        let copy = self.folder.as_ref().zip(path.file_name()).map(|(folder, name)| folder.join(name));
        copy.filter(|copy| copy.exists()).unwrap_or_else(|| path.to_owned())
    }
}

/// Ends the `ExecReload=` of the unit, which waits for this file and prints it.
fn write_result(folder: &Path, result: &str) {
    let new = folder.join(".reload-result");
    let line = if result.is_empty() { String::new() } else { format!("gpuaas: {result}\n") };
    let written = std::fs::write(&new, line).and_then(|()| std::fs::rename(&new, folder.join(RESULT_FILE)));
    if let Err(error) = written {
        tracing::error!(%error, "the result of the reload cannot be written to {}", folder.display());
    }
}

/// The first folder of `RUNTIME_DIRECTORY`, which systemd sets (systemd.exec(5)).
fn runtime_folder(variable: Option<OsString>) -> Option<PathBuf> {
    std::env::split_paths(&variable?).next().filter(|path| path.is_absolute())
}

/// The settings that differ from those at the start, but for those that are reloaded.
fn wait_for_a_restart(settings: &Settings, at_start: impl Fn(&str) -> Option<String>) -> Vec<String> {
    settings
        .iter()
        .filter(|(name, _)| settings_table::is_known(name) && ![DATABASE, LOG_FILTER].contains(&name.as_str()))
        .filter(|(name, value)| at_start(name).as_ref() != Some(value))
        .map(|(name, _)| name.clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_settings_that_a_reload_does_not_take_are_named_without_their_values() {
        let settings = Settings::from(
            [
                ("SVC_PUBLIC_URL", "https://new"),
                ("SVC_MEMBER_NAME", "a"),
                ("RUST_LOG", "debug"),
                (DATABASE, "new"),
                ("MINE", "x"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned())),
        );
        let at_start = |name: &str| Some(if name == "SVC_MEMBER_NAME" { "a" } else { "old" }.to_owned());
        assert_eq!(wait_for_a_restart(&settings, at_start), ["SVC_PUBLIC_URL"]);
    }

    #[test]
    fn runtime_folder_is_the_first_of_the_unit() {
        assert_eq!(runtime_folder(Some("/run/gpuaas:/run/other".into())), Some(PathBuf::from("/run/gpuaas")));
        assert_eq!(runtime_folder(Some("".into())), None);
        assert_eq!(runtime_folder(None), None);
    }
}
