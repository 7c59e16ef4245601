//! `gpuaas`: the control plane. One binary holds every role.

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use std::time::Duration;
use supervisors::audit_command::{self, AuditArgs};
use supervisors::begin_incarnation_command::{self, BeginIncarnationArgs};
use supervisors::cluster::nats_permissions;
use supervisors::config::ConfigError;
use supervisors::config_command::{self, ConfigArgs};
#[cfg(feature = "dev")]
use supervisors::dev::{self, DevArgs};
use supervisors::doctor::{self, DoctorArgs};
use supervisors::key_ring_command::{self, KeyRingArgs};
use supervisors::ledger_command::{self, LedgerArgs};
use supervisors::migrate_command::{self, MigrateArgs};
use supervisors::node_ca_command::{self, NodeCaArgs};
use supervisors::recover_report::{self, RecoverReportArgs};
use supervisors::retention_command::{self, RetentionArgs};
use supervisors::snapshot_seal_command::{self, SealArgs};
use supervisors::support_bundle::{self, SupportBundleArgs};
use supervisors::{config, exit_status, logging, process_roles, serve, settings_files};

/// Returns memory after a burst, and touches no page of a buffer before it is written (decisions/0014).
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// The control plane that rents out GPU nodes.
#[derive(Debug, Parser)]
#[command(name = "gpuaas", version, arg_required_else_help = true, after_help = AFTER_HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "Operators look at the running cluster with gpuctl: tree, keys, restart, overview, nodes.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the control plane; set up by SVC_* variables.
    Serve {
        #[arg(long, env = "SVC_ROLES", default_value = "all", help = process_roles::roles_help())]
        roles: String,
    },
    /// Starts a whole environment on this machine and runs the first rental in it.
    #[cfg(feature = "dev")]
    Dev(DevArgs),
    /// Checks the settings of an environment file: unknown names, wrong and missing values, all at once. Exits with 0 or 78.
    Config(ConfigArgs),
    /// Looks at everything that a replica needs (settings, certificates, Postgres, NATS, identity provider, ports, limits), and says what to do
    /// about what is wrong. Changes nothing. Exits with 0 where nothing is wrong, with 1 for warnings, with 2 for errors.
    Doctor(DoctorArgs),
    /// Collects what is needed to diagnose a fault from elsewhere into one archive, without secrets: findings of doctor, settings, supervision tree, overdue
    /// and parked entities, metrics, the log, Postgres' locks, streams. Works while the service, Postgres or NATS do not.
    SupportBundle(SupportBundleArgs),
    /// Brings the database to this release's schema, apart from serving: expand before members of this release start, contract once none of
    /// an earlier one is left. Exits with 0 where that is done, and with 75 where a contract waits for members of an earlier release.
    Migrate(MigrateArgs),
    /// Shows how large the tables of the database are and grow, what the retention policies keep, what their next run removes, and in how many
    /// days the disk is full. Changes nothing.
    Retention(RetentionArgs),
    /// Starts a new incarnation of a database that was restored from a backup; run it once, while no member runs. What the backup has lost
    /// must not be taken for something new. It releases every shard and raises every epoch. Where nothing was restored, it changes nothing.
    BeginIncarnation(BeginIncarnationArgs),
    /// Lists what a database that was restored from a backup has lost, by what NATS, the nodes and the payment processor have: tenants without
    /// allocation, money without posting, tokens spent. Exits with 0 where nothing is lost, 1 where something is, 2 where a source cannot be read.
    RecoverReport(RecoverReportArgs),
    /// Checks a copy of the key ring against the database.
    KeyRing(KeyRingArgs),
    /// Verifies the audit log, shows its heads, drops an old month.
    Audit(AuditArgs),
    /// Verifies the ledger: every balance against its entries.
    Ledger(LedgerArgs),
    /// Seals stored snapshots that an operator vouches for: after an upgrade from a release without seals, or after a refused snapshot.
    SealSnapshots(SealArgs),
    /// Prints the authorities of node certificates, PEM, for the proxies in front of the node API (deploy/ingress).
    NodeCa(NodeCaArgs),
    /// Prints what a member's NATS user may publish and subscribe to, in the format of the server's configuration.
    NatsPermissions {
        /// The name of the user, as it is in SVC_NATS_URL
        #[arg(long)]
        name: String,
        #[arg(long, default_value = "all", help = process_roles::roles_help())]
        roles: String,
    },
}

/// How long the end of the program waits for threads that are blocked, as on a file system that does not answer.
const BLOCKED_THREADS_WITHIN: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&anyhow::Error::from(error).context("the program's threads cannot be started")),
    };
    let ended = runtime.block_on(started());
    runtime.shutdown_timeout(BLOCKED_THREADS_WITHIN);
    ended.unwrap_or_else(|error| failed(&error))
}

fn failed(error: &anyhow::Error) -> ExitCode {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "gpuaas: {error:#}");
    exit_status::code_of(error)
}

async fn started() -> anyhow::Result<ExitCode> {
    // The dependency graph has one provider; a second installation could only be a bug.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    settings_files::apply()?;
    run(Arguments::parse()).await
}

async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    match arguments.command {
        Command::Serve { roles } => {
            let logging = logging::start().map_err(|error| ConfigError::of(format!("{error:#}")));
            logging::short_panics();
            let (config, (log_filter, traces)) = match (config::Config::from_environment(&roles), logging) {
                (Ok(config), Ok(logging)) => (config, logging),
                (Err(wrong), Err(more)) => return Err(wrong.and(more).into()),
                (Err(wrong), Ok(_)) | (Ok(_), Err(wrong)) => return Err(wrong.into()),
            };
            serve::serve(config, log_filter, traces).await?;
        }
        #[cfg(feature = "dev")]
        Command::Dev(args) => dev::run(args).await?,
        Command::Config(args) => config_command::run(&args)?,
        Command::Doctor(args) => return doctor::run(args).await,
        Command::SupportBundle(args) => support_bundle::run(args).await?,
        Command::Migrate(args) => return migrate_command::run(args).await,
        Command::Retention(args) => retention_command::run(args).await?,
        Command::BeginIncarnation(args) => begin_incarnation_command::run(args).await?,
        Command::RecoverReport(args) => return recover_report::run(args).await,
        Command::KeyRing(args) => key_ring_command::run(args).await?,
        Command::SealSnapshots(args) => snapshot_seal_command::run(args).await?,
        Command::NodeCa(args) => node_ca_command::run(args).await?,
        Command::NatsPermissions { name, roles } => {
            use std::io::Write;
            let permissions = nats_permissions::for_member(&name, &process_roles::parse_roles(&roles)?);
            writeln!(std::io::stdout(), "{:#}", permissions.as_config())?;
        }
        Command::Ledger(args) => return Ok(ledger_command::run(args).await),
        Command::Audit(args) => return Ok(audit_command::run(args).await),
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;
    use std::path::Path;

    #[test]
    fn manual_pages_and_completions_of_the_package_are_those_of_the_commands() {
        // `gpuaas dev` is not in the package.
        let built = Arguments::command();
        let packaged = clap::Command::new("gpuaas")
            .version(env!("CARGO_PKG_VERSION"))
            .about("The control plane that rents out GPU nodes")
            .after_help(AFTER_HELP)
            .subcommands(built.get_subcommands().filter(|command| command.get_name() != "dev").cloned());
        let mut files = manual_pages::pages(packaged.clone(), "8").unwrap();
        files.extend(manual_pages::completions(packaged, "gpuaas"));
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/debian/gpuaas");
        manual_pages::compare(&folder, "gpuaas", &files).unwrap();
    }
}
