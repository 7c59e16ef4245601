//! `gpuaas node-ca`: the authorities of node certificates, for the proxies in front of the node API.

use anyhow::Context;
use edge::trust::current_keys::node_authorities_pem;
use persistence::envelope_encryption::KeyRing;
use persistence::pool::{self, PoolConfig};
use persistence::{Reads, Secrets};
use secrecy::SecretString;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// Where the database is.
#[derive(Debug, clap::Args)]
pub struct NodeCaArgs {
    #[arg(long, env = "SVC_DATABASE_URL", hide_env_values = true)]
    database_url: SecretString,
    /// The authorities that the database's certificate is verified with.
    #[arg(long, env = "SVC_DATABASE_CA_PATH")]
    database_ca: Option<PathBuf>,
    /// The key ring.
    #[arg(long, env = "SVC_KEK_FILE")]
    kek_file: PathBuf,
}

/// Prints the authorities, PEM.
///
/// # Errors
/// Where the database cannot be read, or no member has created the authority yet.
pub async fn run(args: NodeCaArgs) -> anyhow::Result<()> {
    let ring = KeyRing::load(&args.kek_file).context("SVC_KEK_FILE cannot be used")?;
    let database = PoolConfig::new(args.database_url, args.database_ca);
    let pool = pool::open_readable(&database).await?;
    let (secrets, reads) = (Secrets::new(pool.clone(), Arc::new(ring)), Reads::new(pool));
    let authorities = node_authorities_pem(&secrets, &reads).await?;
    let authorities = authorities.context("there is no node CA yet: the first member makes it")?;
    std::io::stdout().lock().write_all(authorities.as_bytes()).context("cannot be written")
}
