//! How this process reaches Postgres.

mod kept;
mod undelayed;

pub(crate) use kept::Kept;
use secrecy::{ExposeSecret, SecretString};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions, PgSslMode};
use sqlx::{ConnectOptions as _, Connection as _, Postgres, Transaction};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use undelayed::undelayed;

/// A connection that rested longer is asked whether it lives before a statement is trusted to it.
const IDLE: Duration = Duration::from_millis(500);

/// How long the first connection may take.
const CONNECTS_WITHIN: Duration = Duration::from_secs(5);

/// Where the database is and how many connections the reads may hold, and everything else that is neither a read nor a
/// commit likewise. The committer's workers hold one more each.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// `postgres://user:password@host:port/database`; client certificates by `sslcert` and `sslkey`; a socket's folder by
    /// `?host=/folder`.
    pub url: SecretString,
    /// The authority that signed the server's certificate. With it the link is TLS and the server's name is checked. Without
    /// it only a socket or a loopback address is spoken to, since everything would pass in clear.
    pub ca: Option<PathBuf>,
    /// As `pg_stat_activity` shows this process.
    pub application_name: String,
    pub connections: u32,
    /// How long a read waits for a connection.
    pub acquire_timeout: Duration,
    /// After this the server gives a read up.
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
    // The source is left out: it may quote the URL, and with it the password.
    #[error("the database URL cannot be read: it should look like postgres://user:password@host:5432/database")]
    Url,
    #[error("the way to the database cannot be laid")]
    Way(#[source] std::io::Error),
    #[error("the database at {host} is not local and no certificate authority is configured to know it by")]
    Unverified { host: String },
}

/// A pool that connects when it is first used. To be called within the runtime.
///
/// # Errors
/// [`PoolError`] where the URL is malformed, or names a foreign host that could not be verified.
pub fn open(config: &PoolConfig) -> Result<PgPool, PoolError> {
    let milliseconds = config.statement_timeout.as_millis().to_string();
    let options = connect_options(config)?.options([("statement_timeout", milliseconds.as_str())]);
    let options = undelayed(options).map_err(PoolError::Way)?;
    Ok(PgPoolOptions::new()
        .max_connections(config.connections)
        .acquire_timeout(config.acquire_timeout)
        .idle_timeout(Duration::from_secs(300))
        // The library asks a connection whether it lives before and after each use. After is enough for one that was used just now.
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
pub enum NoConnection {
    /// It does not answer, or takes no connections at this moment.
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

/// Makes one connection and closes it, so that its failure is told plainly: a pool only reports that none came in time.
///
/// # Errors
/// [`NoConnection`] with the server's own words as the source.
pub async fn reach(config: &PoolConfig) -> Result<(), NoConnection> {
    let options = connect_options(config)?;
    let at = place(&options);
    let connecting = tokio::time::timeout(CONNECTS_WITHIN, options.connect());
    let failed = match connecting.await {
        Ok(Ok(connection)) => {
            // It was reached; how the connection ends changes nothing.
            let _ = connection.close().await;
            return Ok(());
        }
        Ok(Err(error)) => error,
        Err(_) => sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()),
    };
    Err(if is_refusal(&failed) {
        NoConnection::Refused { at, source: failed }
    } else {
        NoConnection::Down { at, source: failed }
    })
}

/// Where the database is, without user and password.
fn place(options: &PgConnectOptions) -> String {
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

/// Begins a transaction, whole or not at all: whoever does not wait for it any more leaves no connection in the middle of one. (The
/// library takes it for begun only when it has the answer; a beginning that is dropped before would go back to the pool as it is, and
/// what is done on that connection afterwards would never be committed.)
pub(crate) async fn begin(
    pool: &PgPool,
    statement: &'static str,
) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
    let pool = pool.clone();
    let begun = tokio::spawn(async move { pool.begin_with(statement).await });
    begun.await.unwrap_or(Err(sqlx::Error::WorkerCrashed))
}

/// The same, of one that locks what others wait for: the server ends it where this process does not go on with it. One that hangs in the
/// middle, however long, would keep its shards from everybody.
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn reach(url: &str, ca: Option<&str>) -> Result<PgConnectOptions, PoolError> {
        connect_options(&PoolConfig::new(url.into(), ca.map(PathBuf::from)))
    }

    #[test]
    fn a_foreign_host_is_not_spoken_to_in_clear() {
        let refused = reach("postgres://u:secret@db.example/x?sslmode=disable", None).unwrap_err();
        assert!(matches!(&refused, PoolError::Unverified { host } if host == "db.example"));
        let verified = reach("postgres://u:secret@db.example/x?sslmode=disable", Some("/ca.pem")).unwrap();
        assert!(matches!(verified.get_ssl_mode(), PgSslMode::VerifyFull));
    }

    #[test]
    fn a_socket_and_loopback_need_no_authority() {
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
