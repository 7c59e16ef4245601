//! `gpuaas`: the control plane. One binary holds every role.

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use supervisors::audit_command::{self, AuditArgs};
use supervisors::config::ConfigError;
use supervisors::dev::{self, DevArgs};
use supervisors::keys_command::{self, KeysArgs};
use supervisors::ledger_command::{self, LedgerArgs};
use supervisors::node_ca_command::{self, NodeCaArgs};
use supervisors::restart_command::{self, RestartArgs};
use supervisors::tree_command::{self, TreeArgs};
use supervisors::{config, exit, logging, serve};

/// Gives memory back after a burst, and touches no page of a buffer before somebody writes to it (decisions/0014).
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// The control plane that rents out GPU nodes.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the control plane; set up by SVC_* variables.
    Serve {
        #[arg(long, env = "SVC_ROLES", default_value = "all", help = config::roles_help())]
        roles: String,
    },
    /// Starts a whole environment on this machine and runs the main job in it.
    Dev(DevArgs),
    /// To be run once on a database that was restored from a backup, while no member runs: what it has forgotten must not be taken for
    /// something new. Frees every shard and lifts every epoch.
    BeginIncarnation,
    /// Shows the supervision tree of the running cluster.
    Tree(TreeArgs),
    /// Shows the service's own keys, and rotates them.
    Keys(KeysArgs),
    /// Starts an entity or a worker of the running cluster anew.
    Restart(RestartArgs),
    /// Verifies the audit log, shows its heads, drops an old month of it.
    Audit(AuditArgs),
    /// Verifies the ledger: every balance against its entries.
    Ledger(LedgerArgs),
    /// Prints the authorities of node certificates, PEM, for the proxies in front of the node API (deploy/ingress).
    NodeCa(NodeCaArgs),
}

#[tokio::main]
async fn main() -> ExitCode {
    // There is one provider in the whole graph; a second call could only be a mistake of ours.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    match run(Arguments::parse()).await {
        Ok(code) => code,
        Err(error) => {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "gpuaas: {error:#}");
            exit::code_of(&error)
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
        Command::Dev(args) => dev::run(args).await?,
        Command::BeginIncarnation => {
            let incarnation = serve::begin_incarnation().await?;
            use std::io::Write;
            writeln!(std::io::stdout(), "incarnation {incarnation}; members may start")?;
        }
        Command::Tree(args) => tree_command::run(args).await?,
        Command::Keys(args) => keys_command::run(args).await?,
        Command::Restart(args) => restart_command::run(args).await?,
        Command::NodeCa(args) => node_ca_command::run(args).await?,
        Command::Ledger(args) => return Ok(ledger_command::run(args).await),
        Command::Audit(args) => return Ok(audit_command::run(args).await),
    }
    Ok(ExitCode::SUCCESS)
}
