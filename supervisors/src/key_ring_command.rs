//! `gpuaas key-ring`: whether a copy of the key ring fits the database.

use anyhow::Context;
use persistence::Secrets;
use persistence::envelope_encryption::KeyRing;
use persistence::pool::{self, PoolConfig};
use secrecy::SecretString;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// The subcommand of `gpuaas key-ring`, and the database.
#[derive(Debug, clap::Args)]
pub struct KeyRingArgs {
    #[command(subcommand)]
    what: KeyRingSubcommand,
    #[arg(long, env = "SVC_DATABASE_URL", hide_env_values = true, global = true)]
    database_url: Option<SecretString>,
    /// The authorities that the database's certificate is verified with.
    #[arg(long, env = "SVC_DATABASE_CA_PATH", global = true)]
    database_ca: Option<PathBuf>,
}

#[derive(Debug, clap::Subcommand)]
enum KeyRingSubcommand {
    /// Opens what the database has sealed, and prints each key with its fingerprint and the number of values that are sealed under it. Exits
    /// with 0 where the key ring fits, and with 78 where it does not.
    Check {
        /// The key ring, or a copy of it.
        #[arg(long, env = "SVC_KEK_FILE")]
        kek_file: PathBuf,
    },
}

/// # Errors
/// Where the database or the file cannot be used, or does not fit.
pub async fn run(args: KeyRingArgs) -> anyhow::Result<()> {
    let url = args.database_url.context("SVC_DATABASE_URL is not set; it must name a postgres:// URL")?;
    let mut config = PoolConfig::new(url, args.database_ca);
    (config.application_name, config.connections) = ("gpuaas key-ring".to_owned(), 1);
    let KeyRingSubcommand::Check { kek_file } = args.what;
    let ring = Arc::new(KeyRing::load(&kek_file).context("the key ring cannot be used")?);
    let rewrap = Secrets::new(pool::open_reached(&config).await?, Arc::clone(&ring)).rewrap();
    rewrap.check().await.context("the key ring does not fit the database")?;
    let sealed = rewrap.sealed().await?;
    let mut out = std::io::stdout().lock();
    for (id, fingerprint) in ring.fingerprints() {
        let active = if id == ring.active() { "  active" } else { "" };
        let count = sealed.get(id).copied().unwrap_or(0);
        writeln!(out, "{id}  {fingerprint}  {count} values{active}")?;
    }
    writeln!(out, "the key ring fits the database")?;
    Ok(())
}
