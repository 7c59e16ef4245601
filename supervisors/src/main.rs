//! `gpuaas`: the control plane. One binary holds every role.

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use supervisors::audit_command::{self, AuditArgs};
use supervisors::cluster::nats_permissions;
use supervisors::config::ConfigError;
#[cfg(feature = "dev")]
use supervisors::dev::{self, DevArgs};
use supervisors::ledger_command::{self, LedgerArgs};
use supervisors::node_ca_command::{self, NodeCaArgs};
use supervisors::snapshot_seal_command::{self, SealArgs};
use supervisors::{config, exit_status, logging, process_roles, serve};

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
    /// Starts a new incarnation of a database that was restored from a backup; run it once, while no member runs. What the backup has lost
    /// must not be taken for something new. It releases every shard and raises every epoch.
    BeginIncarnation,
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
        /// The member's name: SVC_MEMBER_NAME, and the name of the user
        #[arg(long)]
        name: String,
        #[arg(long, default_value = "all", help = process_roles::roles_help())]
        roles: String,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    // The dependency graph has one provider; a second installation could only be a bug.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    match run(Arguments::parse()).await {
        Ok(code) => code,
        Err(error) => {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "gpuaas: {error:#}");
            exit_status::code_of(&error)
        }
    }
}

async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    match arguments.command {
        Command::Serve { roles } => {
            let traces = logging::start().map_err(|error| ConfigError::of(format!("{error:#}")));
            logging::short_panics();
            let (config, traces) = match (config::Config::from_environment(&roles), traces) {
                (Ok(config), Ok(traces)) => (config, traces),
                (Err(wrong), Err(more)) => return Err(wrong.and(more).into()),
                (Err(wrong), Ok(_)) | (Ok(_), Err(wrong)) => return Err(wrong.into()),
            };
            serve::serve(config, traces).await?;
        }
        #[cfg(feature = "dev")]
        Command::Dev(args) => dev::run(args).await?,
        Command::BeginIncarnation => {
            let incarnation = serve::begin_incarnation().await?;
            use std::io::Write;
            writeln!(std::io::stdout(), "incarnation {incarnation}; members may start")?;
        }
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
