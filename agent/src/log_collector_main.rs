//! `gpuaas-log-collector`: pushes the logs of the node's units to the control plane.

use std::path::PathBuf;
use std::process::ExitCode;

use agent::chain;
use agent::config::Flags;
use agent::log_collector::{self, CollectorConfig, CollectorError};
use agent::logging;
use agent::stop_signals::StopSignals;
use clap::Parser;
use tracing::{error, info};

/// The configuration is incomplete or wrong; clap uses the same code for flags.
const WRONG_CONFIGURATION: u8 = 2;
/// As the agent ends where its node was removed.
const NODE_REMOVED: u8 = 4;

/// Collector of a node's logs: pushes the journal of the service's units to the log gateway of the control plane.
///
/// Its SVC_NODE_LOG_COLLECTOR_ variables, and those of the node's bootstrap bundle, may stand in the environment or in the environment
/// file of the bundle.
#[derive(Debug, Parser)]
#[command(name = "gpuaas-log-collector", version)]
struct Arguments {
    /// Environment file of the bootstrap bundle [SVC_NODE_AGENT_ENV_FILE]
    #[arg(long)]
    env_file: Option<PathBuf>,
    /// Filter of log events, in the syntax of RUST_LOG
    #[arg(long, env = "RUST_LOG", default_value = "info")]
    log: String,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Fails only if one is installed already, which is this one.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let flags = Flags { env_file: arguments.env_file, ..Flags::default() };
    let gathered = CollectorConfig::gather(&flags, |name| std::env::var(name).ok());
    let node_id = gathered.as_ref().ok().and_then(|config| Some(config.as_ref()?.agent.node_id));
    if let Err(error) = logging::init(&arguments.log, node_id) {
        use std::io::Write as _;
        // There is no log yet.
        let _ = writeln!(std::io::stderr(), "gpuaas-log-collector: {error:#}");
        return ExitCode::from(WRONG_CONFIGURATION);
    }
    let config = match gathered {
        Ok(Some(config)) => config,
        Ok(None) => {
            info!("the collector is not enabled; SVC_NODE_LOG_COLLECTOR_ENABLED=1 enables it");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            error!(error_code = "configuration", error = chain(&error), "the collector cannot start");
            return ExitCode::from(WRONG_CONFIGURATION);
        }
    };
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!(error_code = "log_collector", error = chain(&error), "the collector ends");
            match error {
                CollectorError::NodeRemoved => ExitCode::from(NODE_REMOVED),
                CollectorError::Client(_) => ExitCode::from(WRONG_CONFIGURATION),
                CollectorError::Store(_) | CollectorError::Gateway(_) | CollectorError::Runtime(_) => ExitCode::FAILURE,
            }
        }
    }
}

fn run(config: CollectorConfig) -> Result<(), CollectorError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(CollectorError::Runtime)?.block_on(async {
        let stop = StopSignals::listen().map_err(CollectorError::Runtime)?.into_token();
        info!(version = env!("CARGO_PKG_VERSION"), endpoint = config.endpoint, "starting");
        tokio::select! {
            ended = log_collector::run(config, stop) => ended,
            never = logging::keep_reporting_dropped_lines() => match never {},
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;
    use std::path::Path;

    #[test]
    fn manual_page_of_the_package_is_that_of_the_flags() {
        let files = manual_pages::pages(Arguments::command(), "8").unwrap();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/debian/gpuaas-agent");
        manual_pages::compare(&folder, "gpuaas-log-collector", &files).unwrap();
    }
}
