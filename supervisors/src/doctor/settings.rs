//! The settings and the files that they name.

use crate::config::installed_settings::InstalledSettings;
use crate::config::settings_table::SECRET_FILES;
use std::path::PathBuf;
use telemetry::diagnosis::{DiagnosticFinding, machine};

pub(super) fn examine(settings: &InstalledSettings) -> Vec<DiagnosticFinding> {
    let source = match &settings.file {
        Some(file) => format!("{} and the environment", file.display()),
        None => "the environment".to_owned(),
    };
    let problems = settings.problems();
    let mut findings: Vec<_> = problems
        .iter()
        .map(|problem| {
            let action =
                format!("correct it in {source}, check with `gpuaas config --check FILE`, and restart the service");
            DiagnosticFinding::error(problem.to_string(), action)
        })
        .collect();
    findings.extend(settings.unknown_names().into_iter().map(|mistake| {
        let action = format!("correct the name in {source}; `gpuaas serve` does not read this one");
        DiagnosticFinding::warning(mistake, action)
    }));
    if problems.is_empty() {
        let count = settings.set().count();
        findings.push(DiagnosticFinding::ok(format!("{count} settings from {source}, and nothing is wrong with them")));
    }
    findings
}

/// Who may read the files with secrets.
pub(super) fn examine_files(settings: &InstalledSettings) -> Vec<DiagnosticFinding> {
    let named = SECRET_FILES.iter().filter_map(|name| Some(((*name).to_owned(), PathBuf::from(settings.get(name)?))));
    let files = named.chain(settings.file.clone().map(|file| ("the environment file".to_owned(), file)));
    let mut findings: Vec<_> = files.filter_map(|(name, path)| machine::secret_file(&name, &path)).collect();
    if findings.is_empty() {
        findings.push(DiagnosticFinding::ok("files with secrets are readable by their owner alone"));
    }
    findings
}
