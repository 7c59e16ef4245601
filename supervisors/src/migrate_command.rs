//! `gpuaas migrate`: brings the database to this release's schema, apart from serving.

use crate::exit_status;
use anyhow::Context;
use persistence::migrate::{MigrationKind, MigrationScope, Migrations, Progress, SchemaMigration, SchemaReport};
use persistence::pool::{self, PoolConfig};
use secrecy::SecretString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// What to apply, and the database.
#[derive(Debug, clap::Args)]
pub struct MigrateArgs {
    /// Print what would be applied, and change nothing.
    #[arg(long)]
    plan: bool,
    /// Leave contracts out, so that the release before can still be started. An empty database gets all migrations.
    #[arg(long)]
    expand: bool,
    #[arg(long, env = "SVC_DATABASE_URL", hide_env_values = true)]
    database_url: Option<SecretString>,
    /// The authorities that the database's certificate is verified with.
    #[arg(long, env = "SVC_DATABASE_CA_PATH")]
    database_ca: Option<PathBuf>,
}

/// Plans or applies.
///
/// # Errors
/// Where the database cannot be used, a migration fails, or the schema is of a later release that removed something.
pub async fn run(args: MigrateArgs) -> anyhow::Result<ExitCode> {
    let url = args.database_url.context("SVC_DATABASE_URL is not set; it must name a postgres:// URL")?;
    let mut config = PoolConfig::new(url, args.database_ca);
    (config.application_name, config.connections) = ("gpuaas migrate".to_owned(), 1);
    let pool = pool::open_reached(&config).await?;
    let release = Migrations::embedded();
    if args.plan {
        let report = release.plan(&pool).await?;
        print(&plan_text(&report));
        return Ok(ExitCode::SUCCESS);
    }
    let scope = if args.expand { MigrationScope::Expand } else { MigrationScope::All };
    let report = release.apply(&pool, scope, &mut |progress| print(&progress_text(&progress))).await?;
    print(&result_text(&report));
    let refused = report.waiting.iter().any(|contract| !contract.needed_by.is_empty());
    Ok(if refused { ExitCode::from(exit_status::WAITS) } else { ExitCode::SUCCESS })
}

/// A closed standard output does not stop a migration.
fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes());
    let _ = out.flush();
}

fn line(migration: &SchemaMigration, what: &str) -> String {
    format!("{:04}  {:<8}  {:<28}  {what}\n", migration.version, migration.kind.name(), migration.name)
}

fn plan_text(report: &SchemaReport) -> String {
    let mut text = String::new();
    for migration in &report.missing {
        let waiting = report.waiting.iter().find(|contract| contract.version == migration.version);
        let what = match waiting {
            Some(contract) => format!("would wait for {}", contract.needed_by.join(", ")),
            None => "would be applied".to_owned(),
        };
        text.push_str(&line(migration, &what));
    }
    text + &state_text(report)
}

fn progress_text(progress: &Progress<'_>) -> String {
    match progress {
        Progress::Waits => "another process migrates this database; waiting for it\n".to_owned(),
        Progress::Locked(migration) => line(migration, "waits for a lock of another transaction"),
        Progress::Applied(migration, took) => line(migration, &format!("applied in {:.3} s", took.as_secs_f64())),
    }
}

fn result_text(report: &SchemaReport) -> String {
    let mut text = String::new();
    for contract in &report.waiting {
        let what = if contract.needed_by.is_empty() {
            "is left out".to_owned()
        } else {
            format!(
                "is refused: these members run an earlier release and need what it removes: {}. Run `gpuaas migrate` once more when they \
                 are replaced or stopped",
                contract.needed_by.join(", ")
            )
        };
        let (version, kind, name) = (contract.version, MigrationKind::Contract.name(), &contract.name);
        text.push_str(&format!("{version:04}  {kind:<8}  {name:<28}  {what}\n"));
    }
    text + &state_text(report)
}

fn state_text(report: &SchemaReport) -> String {
    let known = report.known;
    let count = report.missing.len();
    let mut text = match count {
        0 => format!("the database has all migrations of this release, up to {known:04}\n"),
        1 => format!("the database lacks 1 migration of this release, which goes up to {known:04}\n"),
        _ => format!("the database lacks {count} migrations of this release, which goes up to {known:04}\n"),
    };
    if !report.later.is_empty() {
        let later: Vec<String> = report.later.iter().map(|version| format!("{version:04}")).collect();
        text.push_str(&format!("it also has expansions of a later release: {}\n", later.join(", ")));
    }
    text
}
