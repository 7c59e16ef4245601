//! Connections of this process to Postgres.

mod hosts;
mod nodelay_proxy;
mod primary_monitor;
mod read_pool;
pub(crate) mod session;
mod socket_folder;

use crate::ended_sessions;
use hosts::options_of_hosts;
use nodelay_proxy::{Route, through_nodelay_proxy};
use primary_monitor::PrimaryMonitor;
pub(crate) use read_pool::ReadPool;
use secrecy::SecretString;
use session::SessionSettings;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use sqlx::{Connection as _, Executor as _, Postgres, Row as _, Transaction};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A connection that was idle for longer is pinged before a statement is sent on it.
const IDLE: Duration = Duration::from_millis(500);

/// The timeout of the first connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The database's address, and the bound of connections for reads, and likewise for everything that is neither a read nor a commit.
/// Each of the committer's workers has one more.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// `postgres://user:password@host:port/database`; client certificates by `sslcert` and `sslkey`; a socket's folder by
    /// `?host=/folder`. Several servers as `host1:port,host2:port`: the one that takes writes is used.
    pub url: SecretString,
    /// The authority that signed the server's certificate. With it the connection is TLS and the server's name is verified. Without it
    /// only a socket or a loopback address is accepted, since everything would pass in clear.
    pub ca: Option<PathBuf>,
    /// As `pg_stat_activity` shows this process.
    pub application_name: String,
    pub connections: u32,
    /// How long a read waits for a connection.
    pub acquire_timeout: Duration,
    /// The server cancels a read after this.
    pub statement_timeout: Duration,
}

impl PoolConfig {
    #[must_use]
    pub fn new(url: SecretString, ca: Option<PathBuf>) -> Self {
        Self {
            url,
            ca,
            application_name: "gpuaas".to_owned(),
            connections: 16,
            acquire_timeout: Duration::from_secs(3),
            statement_timeout: Duration::from_secs(10),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    // The source is omitted: it may quote the URL, and with it the password.
    #[error("the database URL cannot be read: it should look like postgres://user:password@host:5432/database")]
    Url,
    #[error("the local proxy to the database cannot be started")]
    Proxy(#[source] std::io::Error),
    #[error("the database URL names {count} servers: at most 8 are read")]
    Hosts { count: usize },
    #[error(
        "target_session_attrs={target} is not read here: only a server that takes writes is used, which is read-write"
    )]
    Target { target: String },
    #[error("the database at {host} is not local and no certificate authority is configured to know it by")]
    Unverified { host: String },
}

/// A pool that connects on first use. To be called within the runtime.
///
/// # Errors
/// [`PoolError`] where the URL is malformed, or names a remote host that could not be verified.
pub fn open(config: &PoolConfig) -> Result<PgPool, PoolError> {
    let options = pooled_options(config)?;
    let [alone] = options.as_slice() else { return open_routed(config, options) };
    Ok(pool_of(config, through_nodelay_proxy(alone.clone()).map_err(PoolError::Proxy)?))
}

/// As [`open`], once a server that takes writes was reached: a pool alone reports a timeout, and finds no pooler that shares sessions.
///
/// # Errors
/// [`ConnectionError`], as [`check_connection`].
pub async fn open_reached(config: &PoolConfig) -> Result<PgPool, ConnectionError> {
    check_connection(config).await?;
    Ok(open(config)?)
}

/// As [`open_reached`], also where the server is a standby: for a command that reads alone.
///
/// # Errors
/// [`ConnectionError`], as [`check_connection`].
pub async fn open_readable(config: &PoolConfig) -> Result<PgPool, ConnectionError> {
    match check_connection(config).await {
        Ok(()) | Err(ConnectionError::ReadOnly { .. }) => Ok(open(config)?),
        Err(error) => Err(error),
    }
}

/// A pool on the server of several that takes writes, followed where that changes.
fn open_routed(config: &PoolConfig, servers: Vec<PgConnectOptions>) -> Result<PgPool, PoolError> {
    let routes = servers.into_iter().map(Route::create).collect::<Result<Vec<_>, _>>().map_err(PoolError::Proxy)?;
    let first = routes.first().map(|route| route.options().clone()).ok_or(PoolError::Url)?;
    let pool = pool_of(config, first);
    PrimaryMonitor::start(pool.clone(), routes);
    Ok(pool)
}

fn pool_of(config: &PoolConfig, options: PgConnectOptions) -> PgPool {
    let settings = SessionSettings::of(&options);
    PgPoolOptions::new()
        .after_connect(move |connection, _| {
            let settings = settings.clone();
            Box::pin(async move {
                match settings.apply(connection).await {
                    // The library logs what fails here as an error. A connection that was lost meanwhile fails its statement. One that still
                    // answers would serve without its time-outs, and is refused.
                    Err(error) if !ended_sessions::has_closed_session(&error) => Err(error),
                    Ok(()) | Err(_) => Ok(()),
                }
            })
        })
        .max_connections(config.connections)
        .acquire_timeout(config.acquire_timeout)
        .idle_timeout(Duration::from_secs(300))
        // The library pings a connection before and after each use. After is enough for one that was used just now.
        .test_before_acquire(false)
        .before_acquire(|connection, rested| {
            Box::pin(async move {
                // One whose server has restarted or become a standby is closed.
                let opened_at = Instant::now().checked_sub(rested.age);
                if opened_at.is_some_and(ended_sessions::has_ended) {
                    return Ok(false);
                }
                Ok(rested.idle_for <= IDLE || takes_writes(connection).await?)
            })
        })
        .connect_lazy_with(options)
}

fn pooled_options(config: &PoolConfig) -> Result<Vec<PgConnectOptions>, PoolError> {
    let milliseconds = config.statement_timeout.as_millis().to_string();
    let with_timeout = |options: PgConnectOptions| options.options([("statement_timeout", milliseconds.as_str())]);
    Ok(options_of_hosts(config)?.into_iter().map(with_timeout).collect())
}

/// Whether the server takes writes: a standby does not. Takes one round trip, as a ping does.
pub(crate) async fn takes_writes(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let row = connection.fetch_one(sqlx::raw_sql("SHOW transaction_read_only")).await?;
    Ok(row.try_get::<String, _>(0)? == "off")
}

/// Opens the pool's further connections, and those of its committer and of its reads, as the user and with the password of `renewed`. Open
/// connections stay. `current` are the settings that the pool was opened with: the database must be the same.
///
/// # Errors
/// [`ConnectionError`] where the database does not accept them, or is another one; nothing is changed then.
pub async fn renew_credentials(
    pool: &PgPool,
    current: &PoolConfig,
    renewed: &PoolConfig,
) -> Result<(), ConnectionError> {
    let (options, before) = (pooled_options(renewed)?, options_of_hosts(current)?);
    let (new, current) = (addresses(&options), addresses(&before));
    if new != current {
        return Err(ConnectionError::AnotherDatabase { new, current });
    }
    check_connection(renewed).await?;
    if let Some(renewed) = options.first() {
        change_connect_options(pool, |options| of_user(renewed, options));
    }
    Ok(())
}

/// Replaces the options of the pool's further connections by what `change` makes of the present ones.
fn change_connect_options(pool: &PgPool, change: impl FnOnce(&PgConnectOptions) -> PgConnectOptions) {
    // Two changes at a time would undo each other.
    static CHANGES: Mutex<()> = Mutex::new(());
    let _one = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    pool.set_connect_options(change(&pool.connect_options()));
}

/// The user, the password and the settings of one, at the address of the other.
fn of_user(settings: &PgConnectOptions, address: &PgConnectOptions) -> PgConnectOptions {
    let options = settings.clone().host(address.get_host()).port(address.get_port());
    match address.get_socket() {
        Some(socket) => options.socket(socket),
        None => options,
    }
}

/// Whether a pool could be opened with these settings, without connecting.
///
/// # Errors
/// As [`open`].
pub fn check(config: &PoolConfig) -> Result<(), PoolError> {
    options_of_hosts(config).map(|_| ())
}

/// Why there is no connection to the database.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// It does not answer, or accepts no connections at the moment.
    #[error("the database at {at} cannot be reached")]
    Down {
        at: String,
        #[source]
        source: sqlx::Error,
    },
    /// It answers and refuses: the password, the user, the database's name or its certificate is wrong.
    #[error("the database at {at} refuses this process")]
    Refused {
        at: String,
        #[source]
        source: sqlx::Error,
    },
    /// A pooler answers, and refuses what a session is started with.
    #[error(
        "the pooler at {at} refuses a parameter of a session's start: add `options` to its ignore_startup_parameters \
         (the settings are made by statement, too)"
    )]
    StartupParameter {
        at: String,
        #[source]
        source: sqlx::Error,
    },
    /// A pooler answers, and gives the session to other clients, too.
    #[error(
        "the pooler at {at} gives a session to several clients (transaction or statement mode): set it to session mode, \
         or name the database itself"
    )]
    SharedSessions { at: String },
    #[error("the pooler at {at} drops a session's settings: {name} is {found}")]
    LostSetting { at: String, name: String, found: String },
    /// It answers, and is a standby or set to read-only.
    #[error("the database at {at} takes no writes: name its primary, or all its servers (host1:5432,host2:5432)")]
    ReadOnly { at: String },
    #[error("the database at {new} is another one than that at {current}, which this process uses: restart it")]
    AnotherDatabase { new: String, current: String },
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Opens one connection to a server that takes writes and closes it, so that the error is reported: a pool only reports a timeout.
///
/// # Errors
/// [`ConnectionError`] with the server's own message as the source; of several servers, that of the one that came nearest.
pub async fn check_connection(config: &PoolConfig) -> Result<(), ConnectionError> {
    let mut failed = None;
    for options in pooled_options(config)? {
        match check_server(&options).await {
            Ok(()) => return Ok(()),
            Err(error) if failed.as_ref().is_none_or(|failed| nearness(&error) > nearness(failed)) => {
                failed = Some(error);
            }
            Err(_) => {}
        }
    }
    Err(failed.unwrap_or(ConnectionError::Pool(PoolError::Url)))
}

/// A server that refuses says more than one that is down.
const fn nearness(error: &ConnectionError) -> u8 {
    match error {
        ConnectionError::Down { .. } => 0,
        ConnectionError::ReadOnly { .. } => 1,
        ConnectionError::Refused { .. }
        | ConnectionError::StartupParameter { .. }
        | ConnectionError::SharedSessions { .. }
        | ConnectionError::LostSetting { .. }
        | ConnectionError::AnotherDatabase { .. }
        | ConnectionError::Pool(_) => 2,
    }
}

async fn check_server(options: &PgConnectOptions) -> Result<(), ConnectionError> {
    let at = address(options);
    let connecting = async {
        let mut connection = session::connect(options).await?;
        let takes_writes = takes_writes(&mut connection).await?;
        let is_usable = if takes_writes {
            session::check(&mut connection, options, &at).await
        } else {
            Err(ConnectionError::ReadOnly { at: at.clone() })
        };
        // It was reached; how the connection closes does not matter.
        let _ = connection.close().await;
        Ok(is_usable)
    };
    let failed = match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(Ok(is_usable)) => return is_usable,
        Ok(Err(error)) => error,
        Err(_) => sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()),
    };
    Err(if is_refusal(&failed) {
        ConnectionError::Refused { at, source: failed }
    } else if refuses_parameter(&failed) {
        ConnectionError::StartupParameter { at, source: failed }
    } else {
        ConnectionError::Down { at, source: failed }
    })
}

fn addresses(servers: &[PgConnectOptions]) -> String {
    servers.iter().map(address).collect::<Vec<_>>().join(",")
}

/// The database's address, without user and password.
fn address(options: &PgConnectOptions) -> String {
    let database = options.get_database().unwrap_or_default();
    match options.get_socket() {
        Some(socket) => format!("{}/{database}", socket.display()),
        None => format!("{}:{}/{database}", options.get_host(), options.get_port()),
    }
}

/// SQLSTATE classes 28 (invalid authorization) and 3D (unknown database), and a certificate that does not verify.
fn is_refusal(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    matches!(error, sqlx::Error::Tls(_)) || code.is_some_and(|code| code.starts_with("28") || code.starts_with("3D"))
}

/// As PgBouncer says it, *unsupported startup parameter* and *unsupported startup parameter in options*: a protocol violation (08P01).
fn refuses_parameter(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .is_some_and(|error| error.code().as_deref() == Some("08P01") && error.message().contains("startup parameter"))
}

/// Begins a transaction, cancel-safe: a caller that is dropped leaves no connection inside a transaction. (The library marks it as
/// begun only with the response; a `BEGIN` that is dropped before would return to the pool as it is, and later statements on that
/// connection would never be committed.)
pub(crate) async fn begin(
    pool: &PgPool,
    statement: &'static str,
) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
    let pool = pool.clone();
    let begun = tokio::spawn(async move { pool.begin_with(statement).await });
    begun.await.unwrap_or(Err(sqlx::Error::WorkerCrashed))
}

/// The same, for a transaction with contended locks: the server ends it where this process stalls. One that hangs inside the
/// transaction would otherwise block its shards for every member.
pub(crate) async fn begin_locking(pool: &PgPool) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
    begin(pool, "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '3s'").await
}
