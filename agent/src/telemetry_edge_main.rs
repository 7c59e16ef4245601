//! `gpuaas-telemetry-edge`: serves the node's telemetry agent to the network.

use std::process::ExitCode;

use agent::chain;
use agent::logging;
use agent::stop_signals::StopSignals;
use agent::telemetry_edge::{EdgeConfig, serve};
use clap::Parser;
use tokio::net::TcpListener;
use tracing::{error, info};

/// The configuration is incomplete or wrong; clap uses the same code for flags.
const WRONG_CONFIGURATION: u8 = 2;

/// Reverse proxy in front of the node's telemetry agent, which listens on the loopback alone.
///
/// It is configured by SVC_TELEMETRY_EDGE_ variables of the environment.
#[derive(Debug, Parser)]
#[command(name = "gpuaas-telemetry-edge", version)]
struct Arguments {
    /// Filter of log events, in the syntax of RUST_LOG
    #[arg(long, env = "RUST_LOG", default_value = "info")]
    log: String,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Fails only if one is installed already, which is this one.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    if let Err(error) = logging::init(&arguments.log, None) {
        use std::io::Write as _;
        // There is no log yet.
        let _ = writeln!(std::io::stderr(), "gpuaas-telemetry-edge: {error:#}");
        return ExitCode::from(WRONG_CONFIGURATION);
    }
    let config = match EdgeConfig::gather(|name| std::env::var(name).ok()) {
        Ok(config) => config,
        Err(error) => {
            error!(error_code = "configuration", error = chain(&error), "the telemetry edge cannot start");
            return ExitCode::from(WRONG_CONFIGURATION);
        }
    };
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!(error_code = "runtime", error = chain(&error), "the telemetry edge ends");
            ExitCode::FAILURE
        }
    }
}

fn run(config: EdgeConfig) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(config.listen).await?;
        let stop = StopSignals::listen()?.into_token();
        let (listen, tls) = (listener.local_addr()?.to_string(), config.tls.is_some());
        info!(version = env!("CARGO_PKG_VERSION"), listen, tls, requires_client = config.requires_client, "serving");
        tokio::select! {
            () = serve(listener, config, stop) => Ok(()),
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
        manual_pages::compare(&folder, "gpuaas-telemetry-edge", &files).unwrap();
    }
}
