//! `gpuaas seal-snapshots`: seals stored snapshots that an operator vouches for.

use crate::cluster_keys;
use anyhow::Context;
use persistence::Secrets;
use persistence::envelope_encryption::KeyRing;
use persistence::pool::{self, PoolConfig};
use secrecy::SecretString;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use uuid::Uuid;

/// The snapshots to seal, and the database.
#[derive(Debug, clap::Args)]
pub struct SealArgs {
    /// The one entity that an operator has inspected after its row was refused. Without it: every entity without a seal, as after an
    /// upgrade from a release that does not seal; one whose seal does not match is left as it is.
    #[arg(long)]
    entity: Option<Uuid>,
    #[arg(long, env = "SVC_DATABASE_URL", hide_env_values = true)]
    database_url: Option<SecretString>,
    /// The authorities that the database's certificate is verified with.
    #[arg(long, env = "SVC_DATABASE_CA_PATH")]
    database_ca: Option<PathBuf>,
    /// The key ring that seals secrets at rest.
    #[arg(long, env = "SVC_KEK_FILE")]
    kek_file: PathBuf,
}

/// # Errors
/// Where the database or the key ring cannot be used.
pub async fn run(args: SealArgs) -> anyhow::Result<()> {
    let url = args.database_url.context("SVC_DATABASE_URL is not set; it must name a postgres:// URL")?;
    let mut config = PoolConfig::new(url, args.database_ca);
    (config.application_name, config.connections) = ("gpuaas seal-snapshots".to_owned(), 1);
    let pool = pool::open_reached(&config).await?;
    let ring = KeyRing::load(&args.kek_file).context("SVC_KEK_FILE cannot be used")?;
    let secrets = Secrets::new(pool.clone(), Arc::new(ring));
    let sealed = cluster_keys::seals(&secrets, None).await?.adopt(&pool, args.entity).await?;
    writeln!(std::io::stdout(), "{sealed} snapshots were sealed as they are stored")?;
    Ok(())
}
