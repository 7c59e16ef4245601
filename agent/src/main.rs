//! `gpuaas-agent`: the node agent as a process.

use std::process::ExitCode;
use std::sync::Arc;

use agent::agent_user::{become_sandbox_user, stay_root};
use agent::chain;
use agent::config::{AgentCommand, AgentConfig, AgentConfigError, ExecutorChoice, Flags};
use agent::daemon::{Fatal, STOP_TIMEOUT};
use agent::service_manager::ServiceManager;
use agent::stop_signals::StopSignals;
use agent::system_executor::keyrings::revoke_own;
use agent::terminal::session_handover::hold;
use clap::Parser as _;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

/// The configuration is incomplete or wrong; clap uses the same code for flags.
const WRONG_CONFIGURATION: u8 = 2;

fn main() -> ExitCode {
    let flags = Flags::parse();
    if flags.forget_keyrings {
        return if revoke_own().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    if flags.hold_terminal {
        return hold();
    }
    if flags.gpu_probe {
        return agent::gpu_probe::serve();
    }
    if let Some(AgentCommand::Doctor(args)) = flags.command.clone() {
        return agent::doctor::run(&args, flags);
    }
    // Before anything is started that would inherit a stored descriptor.
    let manager = Arc::new(ServiceManager::from_environment());
    // Before anything is opened, and before there is a second thread.
    let user = match flags.executor {
        ExecutorChoice::Sandbox => become_sandbox_user(flags.user.as_deref()),
        ExecutorChoice::System => stay_root(flags.user.as_deref()),
    };
    let user = user.map_err(AgentConfigError::from);
    // Fails only if one is installed already, which is this one.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let gathered = user.and_then(|()| AgentConfig::gather(&flags, |name| std::env::var(name).ok()));
    let node_id = gathered.as_ref().ok().map(|config| config.node_id);
    if let Err(error) = agent::logging::init(&flags.log, node_id) {
        use std::io::Write as _;
        // There is no log yet.
        let _ = writeln!(std::io::stderr(), "gpuaas-agent: {error:#}");
        return ExitCode::from(WRONG_CONFIGURATION);
    }
    let config = match gathered {
        Ok(config) => config,
        Err(error) => {
            error!(error_code = "configuration", error = chain(&error), "the agent cannot start");
            return ExitCode::from(WRONG_CONFIGURATION);
        }
    };
    let ended = if flags.clean_up { agent::daemon::clean_up(&config).map_err(Box::new) } else { run(config, manager) };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(fatal) => {
            error!(error_code = fatal.code(), error = chain(&fatal), "the agent ends");
            fatal.exit_code()
        }
    }
}

fn not_set_up(error: std::io::Error) -> Box<Fatal> {
    Box::new(Fatal::Runtime(error))
}

fn run(config: AgentConfig, manager: Arc<ServiceManager>) -> Result<(), Box<Fatal>> {
    // At least two threads: one may be blocked by a disk for a moment.
    let threads = std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    let runtime = runtime.map_err(not_set_up)?;
    let ended = runtime.block_on(async {
        manager.spawn_watchdog();
        let stop = CancellationToken::new();
        let mut signals = StopSignals::listen().map_err(not_set_up)?;
        let (stop_signal, stop_manager) = (stop.clone(), Arc::clone(&manager));
        tokio::spawn(async move {
            signals.received().await;
            info!("stopping");
            end_in_time();
            stop_manager.notify_stopping();
            stop_signal.cancel();
        });
        info!(
            version = env!("CARGO_PKG_VERSION"),
            protocol = wire::PROTOCOL,
            api_url = config.api_url,
            state_dir = %config.state_dir.display(),
            "starting"
        );
        agent::daemon::run(config, manager, stop).await.map_err(Box::new)
    });
    // An effect in flight continues from the journal at the next start.
    runtime.shutdown_background();
    ended
}

/// Ends the process where the stop takes too long: a thread of the runtime may wait for a file system that does not answer.
fn end_in_time() {
    let started = std::thread::Builder::new().name("stop".to_owned()).spawn(|| {
        std::thread::sleep(STOP_TIMEOUT);
        error!(error_code = "stop_overdue", "the stop hangs: tasks are left to the next start");
        std::process::exit(1);
    });
    if let Err(error) = started {
        warn!(error_code = "stop_overdue", %error, "nothing ends a stop that hangs");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;
    use std::path::Path;

    #[test]
    fn manual_page_and_completions_of_the_package_are_those_of_the_flags() {
        let mut files = manual_pages::pages(Flags::command(), "8").unwrap();
        files.extend(manual_pages::completions(Flags::command(), "gpuaas-agent"));
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/debian/gpuaas-agent");
        manual_pages::compare(&folder, "gpuaas-agent", &files).unwrap();
    }
}
