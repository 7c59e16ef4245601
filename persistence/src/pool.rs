//! Connections of this process to Postgres.

mod nodelay_proxy;
mod read_pool;

use nodelay_proxy::through_nodelay_proxy;
pub(crate) use read_pool::ReadPool;
use secrecy::{ExposeSecret, SecretString};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions, PgSslMode};
use sqlx::{ConnectOptions as _, Connection as _, Postgres, Transaction};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// A connection that was idle for longer is pinged before a statement is sent on it.
const IDLE: Duration = Duration::from_millis(500);

/// The timeout of the first connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The database's address, and the bound of connections for reads, and likewise for everything that is neither a read nor a commit.
/// Each of the committer's workers has one more.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// `postgres://user:password@host:port/database`; client certificates by `sslcert` and `sslkey`; a socket's folder by
    /// `?host=/folder`.
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
    #[error("the way to the database cannot be laid")]
    Proxy(#[source] std::io::Error),
    #[error("the database at {host} is not local and no certificate authority is configured to know it by")]
    Unverified { host: String },
}

/// A pool that connects on first use. To be called within the runtime.
///
/// # Errors
/// [`PoolError`] where the URL is malformed, or names a remote host that could not be verified.
pub fn open(config: &PoolConfig) -> Result<PgPool, PoolError> {
    let milliseconds = config.statement_timeout.as_millis().to_string();
    let options = connect_options(config)?.options([("statement_timeout", milliseconds.as_str())]);
    let options = through_nodelay_proxy(options).map_err(PoolError::Proxy)?;
    Ok(PgPoolOptions::new()
        .max_connections(config.connections)
        .acquire_timeout(config.acquire_timeout)
        .idle_timeout(Duration::from_secs(300))
        // The library pings a connection before and after each use. After is enough for one that was used just now.
        .test_before_acquire(false)
        .before_acquire(|connection, rested| {
            Box::pin(async move {
                if rested.idle_for > IDLE {
                    connection.ping().await?;
                }
                Ok(true)
            })
        })
        .connect_lazy_with(options))
}

/// Whether a pool could be opened with these settings, without connecting.
///
/// # Errors
/// As [`open`].
pub fn check(config: &PoolConfig) -> Result<(), PoolError> {
    connect_options(config).map(|_| ())
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
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Opens one connection and closes it, so that its error is reported: a pool only reports a timeout.
///
/// # Errors
/// [`ConnectionError`] with the server's own message as the source.
pub async fn check_connection(config: &PoolConfig) -> Result<(), ConnectionError> {
    let options = connect_options(config)?;
    let at = address(&options);
    let connecting = tokio::time::timeout(CONNECT_TIMEOUT, options.connect());
    let failed = match connecting.await {
        Ok(Ok(connection)) => {
            // It was reached; how the connection closes does not matter.
            let _ = connection.close().await;
            return Ok(());
        }
        Ok(Err(error)) => error,
        Err(_) => sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()),
    };
    Err(if is_refusal(&failed) {
        ConnectionError::Refused { at, source: failed }
    } else {
        ConnectionError::Down { at, source: failed }
    })
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

fn connect_options(config: &PoolConfig) -> Result<PgConnectOptions, PoolError> {
    let options = PgConnectOptions::from_str(config.url.expose_secret()).map_err(|_| PoolError::Url)?;
    let options = options.application_name(&config.application_name);
    match &config.ca {
        Some(ca) => Ok(options.ssl_mode(PgSslMode::VerifyFull).ssl_root_cert(ca)),
        None if is_local(&options) => Ok(options),
        None => Err(PoolError::Unverified { host: options.get_host().to_owned() }),
    }
}

fn is_local(options: &PgConnectOptions) -> bool {
    let host = options.get_host();
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    options.get_socket().is_some()
        || host.starts_with('/')
        || host == "localhost"
        || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reach(url: &str, ca: Option<&str>) -> Result<PgConnectOptions, PoolError> {
        connect_options(&PoolConfig::new(url.into(), ca.map(PathBuf::from)))
    }

    #[test]
    fn remote_host_without_tls_is_refused() {
        let refused = reach("postgres://u:secret@db.example/x?sslmode=disable", None).unwrap_err();
        assert!(matches!(&refused, PoolError::Unverified { host } if host == "db.example"));
        let verified = reach("postgres://u:secret@db.example/x?sslmode=disable", Some("/ca.pem")).unwrap();
        assert!(matches!(verified.get_ssl_mode(), PgSslMode::VerifyFull));
    }

    #[test]
    fn socket_and_loopback_need_no_certificate_authority() {
        for url in ["postgres://u@127.0.0.1/x", "postgres://u@[::1]/x", "postgres:///x?host=/run/postgresql"] {
            assert!(reach(url, None).is_ok(), "{url}");
        }
    }

    #[test]
    fn a_bad_url_is_refused_without_quoting_it() {
        let error = reach("postgres//u:hunter2@x", None).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"));
    }
}
