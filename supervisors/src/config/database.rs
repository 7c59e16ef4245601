//! The database, which a few commands also take from their command line.

use super::variables::Variables;
use persistence::pool::{self, PoolConfig, PoolError};
use secrecy::{ExposeSecret as _, SecretString};
use std::path::PathBuf;

const DATABASE_URL: &str = "SVC_DATABASE_URL";
const DATABASE_CA: &str = "SVC_DATABASE_CA_PATH";

/// The database of a command that also needs the other settings of a replica.
#[derive(Debug, clap::Args)]
pub struct DatabaseArgs {
    #[arg(long, env = DATABASE_URL, hide_env_values = true)]
    database_url: Option<SecretString>,
    /// The authorities that the database's certificate is verified with.
    #[arg(long, env = DATABASE_CA)]
    database_ca: Option<PathBuf>,
}

impl DatabaseArgs {
    /// The value of a setting that is given here.
    pub(super) fn value(&self, name: &str) -> Option<String> {
        match name {
            DATABASE_URL => self.database_url.as_ref().map(|url| url.expose_secret().to_owned()),
            DATABASE_CA => self.database_ca.as_ref().map(|path| path.display().to_string()),
            _ => None,
        }
    }
}

/// The URL is a secret: it may hold a password.
pub(super) fn database(variables: &mut Variables<'_>) -> (String, Option<PathBuf>) {
    let url = variables.required(
        DATABASE_URL,
        "a URL such as postgres://user:password@db.example:5432/gpuaas, or postgres:///gpuaas?host=/run/postgresql&user=gpuaas for a socket",
    );
    let ca = variables.optional_certificates(DATABASE_CA);
    if !url.is_empty() {
        match pool::check(&PoolConfig::new(url.clone().into(), ca.clone())) {
            Ok(()) => {}
            Err(error @ PoolError::Unverified { .. }) => {
                variables.wrong(format!(
                    "{DATABASE_CA} is not set, but {error}; it must name the authorities of its certificate, PEM"
                ));
            }
            Err(
                error @ (PoolError::Url | PoolError::Proxy(_) | PoolError::Hosts { .. } | PoolError::Target { .. }),
            ) => variables.wrong(format!("{DATABASE_URL}: {error}")),
        }
    }
    (url, ca)
}
