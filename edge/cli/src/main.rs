//! `gpuctl`: the command line of the service. It uses the public API alone, as any client can.
//!
//! One file per noun. `gpuctl <noun> <verb>`; a command on one resource takes its id first; `--output json` prints the response of the
//! API.
//!
//! | command | uses |
//! | --- | --- |
//! | `login` · `logout` · `whoami` | the identity provider (OpenID Connect Discovery), and stores the tokens under `$XDG_CONFIG_HOME/gpuctl` |
//! | `skus list` · `show` · `create` · `update` · `activate` · `deprecate` · `deactivate` | `GET /api/v1/skus`, `/api/v1/admin/skus…` |
//! | `capacity` | `GET /api/v1/capacity` |
//! | `allocations create` · `list` · `show` · `release` · `ssh-keys` · `events [--follow]` · `telemetry` · `retry-release` · `force-release` | `/api/v1/allocations…`, and its stream of events until it is active |
//! | `ssh ALLOCATION [-- COMMAND…]` | the user's own ssh, with the host key that the allocation names |
//! | `terminal sessions list` · `show` · `end` · `kill` | `/api/v1/allocations/{id}/terminal-sessions…`, `/api/v1/admin/terminal-sessions…` |
//! | `terminal ALLOCATION` | `POST …/terminal-tokens`, then the WebSocket, with reconnects |
//! | `notifications watch` · `broadcast` | the WebSocket `/api/v1/notifications/ws`, with reconnects; `POST /api/v1/admin/notifications/broadcast` |
//! | `recordings list` · `show` · `download` · `play` | `GET …/recordings`, `GET /api/v1/recordings/{id}` and its `asciicast` |
//! | `billing balance` · `ledger` · `estimate` · `statements` · `statement [--as csv\|pdf]` · `accounts` · `open-account` · `adjust` | `/api/v1/billing…`, and `/api/v1/admin/billing/accounts…` with `--account` |
//! | `billing top-up [--wait]` · `payments` · `payment` · `refund` | `POST /api/v1/billing/checkout-sessions`, and the page that it names; `/api/v1/billing/payments…`, `POST /api/v1/billing/refunds` |
//! | `ssh-keys add` · `list` · `delete` · `default` | `/api/v1/ssh-keys…` |
//! | `nodes list` · `show` · `create` · `update` · `token` · `script` · `reissue` · `tasks` · `run` · `resume` · `retire` · `reactivate` · `remove` · `quarantine` · `release-quarantine` · `clear-finding` | `/api/v1/admin/nodes…` |
//! | `service-accounts list` · `create` · `show` · `delete` · `add-key` · `revoke-key` | `/api/v1/service-accounts…` |
//! | `billing settle-review` · `dismiss-review` | `/api/v1/admin/billing/payments/{id}/…` |
//! | `processor-events list` · `show` · `retry` · `dismiss` | `/api/v1/admin/billing/processor-events…` |
//! | `sessions list [--all]` · `end` · `kill` | `/api/v1/me/sessions…`, `/api/v1/admin/browser-sessions…` |
//! | `roles list` · `bind` · `revoke` | `/api/v1/admin/platform-roles/bindings` |
//! | `keys list` · `stage` · `activate` · `retire` · `rewrap` | `/api/v1/admin/keys…` |
//! | `policy catalog` · `list` · `set` · `unset` · `resolve` | `/api/v1/admin/polic…` |
//! | `audit list` | `GET /api/v1/admin/audit-log` |
//! | `alerts` | `GET /api/v1/admin/alerts` |
//! | `fleet` | `GET /api/v1/admin/telemetry/fleet` |
//! | `fleet-history` | `GET /api/v1/admin/fleet-history` |
//! | `overview` · `tree` · `cluster` · `entity` · `restart` | `GET /api/v1/admin/overview`, `/api/v1/admin/runtime…` |
//! | `completions SHELL` | nothing; completion lists candidates from the API |
//!
//! The exit codes are those of [`failure::ExitStatus`]; `ssh` and `terminal` exit with the status of the remote program.
//!
//! A new noun is a file here, a variant of [`Command`], an arm of [`execute`] and its routes in [`routes::COMMANDS`].
//!
//! | module | what |
//! | --- | --- |
//! | `alerts`, `allocations`, `audit`, `billing`, `capacity`, `cluster`, `fleet`, `fleet_history`, `health_rules`, `keys`, `login`, `nodes`, `notification_endpoints`, `notifications`, `overview`, `policy`, `processor_events`, `recordings`, `roles`, `rollouts`, `service_accounts`, `sessions`, `skus`, `ssh`, `ssh_keys`, `supervision_tree`, `terminal` | the nouns |
//! | `api`, `http_client`, `retry_after`, `websocket`, `allocation_events` | the client of the API, and of its streams |
//! | `routes`, `argument_names` | the routes that each command uses; the fields that its arguments set |
//! | `amount`, `duration`, `instant`, `labels`, `resource_ref` | arguments as types |
//! | `output`, `progress`, `printable`, `sanitize`, `text_encoding`, `download` | what is printed and stored |
//! | `confirmation`, `failure`, `usage_error`, `completion` | questions, exit codes, refusals of command lines, completion by the shell |

mod alerts;
mod allocation_events;
mod allocations;
mod amount;
mod api;
mod argument_names;
mod audit;
mod billing;
mod capacity;
mod cluster;
mod completion;
mod confirmation;
mod download;
mod duration;
mod failure;
mod fleet;
mod fleet_history;
mod health_rules;
mod http_client;
mod instant;
mod keys;
mod labels;
mod login;
mod nodes;
mod notification_endpoints;
mod notifications;
mod output;
mod overview;
mod policy;
mod printable;
mod processor_events;
mod progress;
mod recordings;
mod resource_ref;
mod retry_after;
mod roles;
mod rollouts;
mod routes;
mod sanitize;
mod service_accounts;
mod sessions;
mod skus;
mod ssh;
mod ssh_keys;
mod supervision_tree;
mod terminal;
mod text_encoding;
mod usage_error;
mod websocket;

use api::Api;
use argument_names::SelectedCommand;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use clap_complete::env::Shells;
use clap_complete::{CompleteEnv, Shell};
use failure::{ExitStatus, Failure};
use login::login_store::{Login, Store};
use login::{LoginArgs, Session};
use output::{Output, OutputFormat, print_error};
use reqwest::Url;
use secrecy::SecretString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Rents GPUs, and opens shells on what is rented.
#[derive(Debug, Parser)]
#[command(name = "gpuctl", version, arg_required_else_help = true, max_term_width = 120, after_help = AFTER_HELP)]
struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Exit codes: 0 done, 1 failed here, 2 usage, 3 not logged in, 4 forbidden, 5 not found, 6 refused in this state, 7 too many requests, \
8 the service failed, 9 unreachable, 10 too late. `ssh` and `terminal` end as the program there does.

Everything of the service is its public API; its description is at /api/v1/docs of the server.";

/// What every command takes.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Everywhere")]
struct Common {
    /// The service's address; after a login it is known. [env: SVC_BASE_URL]
    #[arg(long, global = true, value_name = "URL")]
    server: Option<String>,
    /// The authorities of the service's certificate, PEM, where they are not the system's. [env: SVC_CA_BUNDLE_PATH]
    #[arg(long, global = true, value_name = "FILE")]
    ca_bundle: Option<PathBuf>,
    /// The profile: the stored login to use; `default` if it is left out. [env: SVC_PROFILE]
    #[arg(long, global = true, value_name = "NAME")]
    profile: Option<String>,
    /// An access token to be used as it is, in place of a login. [env: SVC_ACCESS_TOKEN]
    #[arg(long, global = true, value_name = "TOKEN", hide = true)]
    access_token: Option<SecretString>,
    /// How results are printed.
    #[arg(long, short, global = true, value_enum, value_name = "FORMAT", default_value_t)]
    output: OutputFormat,
    /// Print results, errors, and what you have to do for the command to go on, and nothing else.
    #[arg(long, short, global = true)]
    quiet: bool,
    /// Your own Idempotency-Key for the change: a repetition with it has no second effect.
    #[arg(long, global = true, value_name = "KEY", value_parser = idempotency_key)]
    idempotency_key: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Logs in at the service's identity provider.
    Login(LoginArgs),
    /// Removes the login, and revokes it at the provider.
    Logout,
    /// Shows who is logged in, and whether the service agrees.
    Whoami,
    /// SKUs: the machines that can be rented, and their prices.
    #[command(subcommand, alias = "sku")]
    Skus(skus::Command),
    /// Shows how many GPUs are free, by SKU and region.
    Capacity,
    /// Allocations: rent GPUs, look at what you rent, release it.
    #[command(subcommand, alias = "allocation")]
    Allocations(allocations::Command),
    /// Opens an SSH session on an allocation, or runs a command there.
    Ssh(ssh::SshArgs),
    /// Opens a terminal on an allocation, or shows and ends those there are.
    Terminal(terminal::TerminalArgs),
    /// Notifications: watch what happens to your resources.
    #[command(subcommand, alias = "notification")]
    Notifications(notifications::Command),
    /// Notification endpoints: webhooks and e-mail addresses for events.
    #[command(subcommand, alias = "notification-endpoint")]
    NotificationEndpoints(notification_endpoints::Command),
    /// Recordings: what terminals showed, to be played back.
    #[command(subcommand, alias = "recording")]
    Recordings(recordings::Command),
    /// Billing: your balance, payments, statements and refunds.
    #[command(subcommand)]
    Billing(billing::Command),
    /// SSH keys: what opens what you rent.
    #[command(subcommand, alias = "ssh-key")]
    SshKeys(ssh_keys::Command),
    /// Service accounts: for programs that act for you.
    #[command(subcommand, alias = "service-account")]
    ServiceAccounts(service_accounts::Command),
    /// Sessions: your logins to the web console.
    #[command(subcommand, alias = "session")]
    Sessions(sessions::Command),
    /// Billing operators: events of the payment processor.
    #[command(subcommand, alias = "processor-event")]
    ProcessorEvents(processor_events::Command),
    /// Administrators: the machines.
    #[command(subcommand, alias = "node")]
    Nodes(nodes::Command),
    /// Administrators: updates of the agents of many nodes.
    #[command(subcommand, alias = "rollout")]
    Rollouts(rollouts::Command),
    /// Administrators: rules for what follows from health findings.
    #[command(subcommand, alias = "health-rule")]
    HealthRules(health_rules::Command),
    /// Administrators: policies: limits, lifetimes and switches.
    #[command(subcommand, alias = "policies")]
    Policy(policy::Command),
    /// Administrators and auditors: the audit log.
    #[command(subcommand)]
    Audit(audit::Command),
    /// Administrators: who has which platform role.
    #[command(subcommand, alias = "role")]
    Roles(roles::Command),
    /// Administrators: the service's own keys, and their rotation.
    #[command(subcommand, alias = "key")]
    Keys(keys::Command),
    /// Administrators: shows the service on one screen.
    Overview,
    /// Administrators: lists the alerts that fire in the monitoring of the service.
    Alerts,
    /// Administrators: shows the load of the nodes by SKU and region, and the nodes that do not report.
    Fleet,
    /// Administrators: shows the fleet hour by hour, with its GPUs, rentals and revenue.
    FleetHistory(fleet_history::FleetHistoryArgs),
    /// Administrators: shows the supervision tree of the cluster, and what entities wait for.
    Tree(supervision_tree::TreeArgs),
    /// Administrators: lists the members of the cluster.
    Cluster,
    /// Administrators: shows one entity, and how it came to its state.
    Entity(cluster::EntityArgs),
    /// Administrators: restarts an entity or a worker.
    Restart(cluster::RestartArgs),
    /// Prints the completion script of a shell: commands, ids, names and policy keys.
    Completions { shell: Shell },
}

fn idempotency_key(text: &str) -> Result<String, String> {
    let good = !text.is_empty() && text.len() <= 255 && text.bytes().all(|byte| byte.is_ascii_graphic());
    good.then(|| text.to_owned()).ok_or_else(|| "a key is 1 to 255 printable ASCII characters".to_owned())
}

fn main() -> ExitCode {
    // A completion request of a shell is answered here, and the process ends.
    CompleteEnv::with_factory(Arguments::command).var(COMPLETE).complete();
    let parsed = Arguments::command().try_get_matches();
    let parsed = parsed.and_then(|matches| Ok((Arguments::from_arg_matches(&matches)?, matches)));
    let (arguments, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return usage_error::report(&error, std::env::args_os().skip(1)),
    };
    let format = arguments.common.output;
    let profile = profile_of(arguments.common.profile.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| {
        Failure::new(ExitStatus::Failed, format!("gpuctl cannot start: {error}"))
            .next("Free memory, or raise the limits of open files and processes (ulimit).")
    });
    match runtime.and_then(|runtime| runtime.block_on(run(arguments))) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            let failure = failure.for_command(&SelectedCommand::of(&matches)).of_profile(&profile);
            match format {
                OutputFormat::Table => print_error(&failure.to_string()),
                OutputFormat::Json => print_error(&failure.to_json().to_string()),
            }
            ExitCode::from(failure.exit_status.code())
        }
    }
}

async fn run(arguments: Arguments) -> Result<u8, Failure> {
    let connection = Connection::of(arguments.common)?;
    execute(arguments.command, connection).await
}

async fn execute(command: Command, mut connection: Connection) -> Result<u8, Failure> {
    match command {
        Command::Login(args) => login::login(args, &connection).await?,
        Command::Logout => login::logout(&connection).await?,
        Command::Whoami => login::whoami(&connection).await?,
        Command::Skus(command) => skus::run(command, &connection.api()?).await?,
        Command::Allocations(command) => allocations::run(command, &connection.api()?).await?,
        Command::Ssh(args) => return ssh::run(args, &connection).await,
        Command::Terminal(args) => {
            let out = connection.out;
            // A notice of the API's client in the middle of a raw terminal would look like output of the shell.
            connection.out.quiet |= args.is_interactive();
            return terminal::run(args, &connection.api()?, out).await;
        }
        Command::Notifications(command) => notifications::run(command, &connection.api()?).await?,
        Command::NotificationEndpoints(command) => notification_endpoints::run(command, &connection.api()?).await?,
        Command::Recordings(command) => recordings::run(command, &connection.api()?).await?,
        Command::Billing(command) => billing::run(command, &connection.api()?).await?,
        Command::SshKeys(command) => ssh_keys::run(command, &connection.api()?).await?,
        Command::ServiceAccounts(command) => service_accounts::run(command, &connection.api()?).await?,
        Command::Sessions(command) => sessions::run(command, &connection.api()?).await?,
        Command::ProcessorEvents(command) => processor_events::run(command, &connection.api()?).await?,
        Command::Nodes(command) => nodes::run(command, &connection.api()?).await?,
        Command::Rollouts(command) => rollouts::run(command, &connection.api()?).await?,
        Command::HealthRules(command) => health_rules::run(command, &connection.api()?).await?,
        Command::Policy(command) => policy::run(command, &connection.api()?).await?,
        Command::Audit(command) => audit::run(command, &connection.api()?).await?,
        Command::Roles(command) => roles::run(command, &connection.api()?).await?,
        Command::Keys(command) => keys::run(command, &connection.api()?).await?,
        Command::Capacity => capacity::run(&connection.api()?).await?,
        Command::Alerts => alerts::run(&connection.api()?).await?,
        Command::Fleet => fleet::run(&connection.api()?).await?,
        Command::FleetHistory(args) => fleet_history::run(args, &connection.api()?).await?,
        Command::Overview => overview::run(&connection.api()?).await?,
        Command::Tree(args) => supervision_tree::run(args, &connection.api()?).await?,
        Command::Cluster => cluster::cluster(&connection.api()?).await?,
        Command::Entity(args) => cluster::entity(args, &connection.api()?).await?,
        Command::Restart(args) => cluster::restart(args, &connection.api()?).await?,
        Command::Completions { shell } => completions(shell, connection.out)?,
    }
    Ok(0)
}

/// The variable by which a shell's script asks this program for completions.
const COMPLETE: &str = "GPUCTL_COMPLETE";

fn completions(shell: Shell, out: Output) -> Result<(), Failure> {
    out.line(completion_script(shell)?.trim_end())
}

fn completion_script(shell: Shell) -> Result<String, Failure> {
    let mut script = Vec::new();
    let shells = Shells::builtins();
    let completer = shells.completer(&shell.to_string());
    let completer = completer.ok_or_else(|| Failure::usage(format!("there are no completions for {shell}")))?;
    let written = completer.write_registration(COMPLETE, "gpuctl", "gpuctl", "gpuctl", &mut script);
    written.map_err(|error| Failure::new(ExitStatus::Failed, error.to_string()))?;
    let mut script = String::from_utf8_lossy(&script).into_owned();
    if shell == Shell::Zsh {
        // As a file of `$fpath`, it is run at the first completion of a session, which wants its candidates.
        script.push_str("[[ ${funcstack[1]} != _gpuctl ]] || _clap_dynamic_completer_gpuctl\n");
    }
    Ok(script)
}

/// An environment variable. Empty counts as unset. Clap does not read these: variables that it reads appear in every usage line.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The service's address and the credentials of a command.
pub(crate) struct Connection {
    server: Option<String>,
    ca_bundle: Option<PathBuf>,
    token: Option<SecretString>,
    key: Option<String>,
    pub(crate) store: Store,
    pub(crate) out: Output,
}

/// The profile where none is named.
pub(crate) const DEFAULT_PROFILE: &str = "default";

fn profile_of(named: Option<String>) -> String {
    named.or_else(|| variable("SVC_PROFILE")).unwrap_or_else(|| DEFAULT_PROFILE.to_owned())
}

impl Connection {
    fn of(common: Common) -> Result<Self, Failure> {
        let profile = profile_of(common.profile.clone());
        Ok(Self {
            server: common.server.or_else(|| variable("SVC_BASE_URL")),
            ca_bundle: common.ca_bundle.or_else(|| variable("SVC_CA_BUNDLE_PATH").map(PathBuf::from)),
            token: common.access_token.or_else(|| variable("SVC_ACCESS_TOKEN").map(SecretString::from)),
            key: common.idempotency_key,
            store: Store::of_user(&profile)?,
            out: Output { format: common.output, quiet: common.quiet },
        })
    }

    /// The service's address, as the user gave it.
    pub(crate) fn named_server(&self) -> Result<Url, Failure> {
        let Some(server) = &self.server else {
            return Err(Failure::usage("no server was named").next("Say which: --server URL, or SVC_BASE_URL."));
        };
        http_client::address(server)
    }

    /// The service's address for a login: as the user gave it, or that of the login before.
    pub(crate) fn login_server(&self) -> Result<Url, Failure> {
        match (&self.server, self.store.read()) {
            (None, Ok(Some(login))) => http_client::address(&login.server),
            (_, _) => self.named_server(),
        }
    }

    /// The absolute path, valid from any working directory.
    pub(crate) fn ca_bundle(&self) -> Result<Option<PathBuf>, Failure> {
        let Some(path) = &self.ca_bundle else { return Ok(None) };
        let whole = path.canonicalize();
        whole.map(Some).map_err(|error| http_client::unusable_bundle(path, &error.to_string()))
    }

    /// The stored login; `None` where a token was given instead.
    pub(crate) fn login(&self) -> Result<Option<Login>, Failure> {
        if self.token.is_some() {
            return Ok(None);
        }
        let logged_out = |why: String| Failure::new(ExitStatus::LoggedOut, why).next("Log in: gpuctl login");
        let profile = self.store.profile();
        let login =
            self.store.read()?.ok_or_else(|| logged_out(format!("no user is logged in (profile {profile})")))?;
        // A token is sent only to the server for which it was issued.
        match &self.server {
            Some(server) if !login::same_server(server, &login.server) => {
                let at = &login.server;
                Err(logged_out(format!("you are logged in at {at}, and not at {server} (--server, SVC_BASE_URL)")))
            }
            Some(_) | None => Ok(Some(login)),
        }
    }

    pub(crate) fn api(&self) -> Result<Api, Failure> {
        let (server, ca_bundle, session) = match (self.login()?, &self.token) {
            (Some(login), _) => {
                let ca_bundle = self.ca_bundle()?.or_else(|| login.ca_bundle.clone());
                let server = http_client::address(&login.server)?;
                (server, ca_bundle, Session::stored(self.store.clone(), login, self.out))
            }
            (None, Some(token)) => (self.named_server()?, self.ca_bundle()?, Session::AccessToken(token.clone())),
            (None, None) => return Err(Failure::new(ExitStatus::LoggedOut, "no user is logged in")),
        };
        Api::new(server, ca_bundle.as_ref(), session, self.key.clone(), self.out)
    }
}

#[cfg(test)]
mod tests;
