//! `gpuaas audit`: verifies the audit log's chains, shows its heads, drops an old month.

use crate::cluster::nats;
use crate::cluster_keys;
use crate::exit_status;
use crate::workers::audit_seal::archived;
use anyhow::{Context, bail};
use chrono::{TimeDelta, Utc};
use domain::Shard;
use persistence::audit::{AuditKeys, AuditReport, AuditVerification, SignedHead, drop_month, verify};
use persistence::envelope_encryption::KeyRing;
use persistence::pool::{self, PoolConfig};
use persistence::{Reads, Secrets};
use secrecy::SecretString;
use serde_json::json;
use sqlx::PgPool;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// The subcommand of `gpuaas audit`, and the database.
#[derive(Debug, clap::Args)]
pub struct AuditArgs {
    #[command(subcommand)]
    what: AuditSubcommand,
    #[arg(long, env = "SVC_DATABASE_URL", hide_env_values = true, global = true)]
    database_url: Option<SecretString>,
    /// The authorities that the database's certificate is verified with.
    #[arg(long, env = "SVC_DATABASE_CA_PATH", global = true)]
    database_ca: Option<PathBuf>,
    /// The key ring that opens the audit key.
    #[arg(long, env = "SVC_KEK_FILE", global = true)]
    kek_file: Option<PathBuf>,
}

#[derive(Debug, clap::Subcommand)]
enum AuditSubcommand {
    /// Recomputes every chain. Exits with 0 where all is well, with 1 where something is wrong, with 2 where that is not known.
    Verify(VerifyArgs),
    /// Shows the newest signed head of every shard, one JSON a line: keep them where operators of this service cannot change them.
    Heads,
    /// Shows the public key that verifies heads.
    Key,
    /// Drops a past month, after signing a checkpoint for each chain.
    Forget {
        /// As 2026-03.
        month: String,
    },
}

#[derive(Debug, clap::Args)]
struct VerifyArgs {
    /// This shard alone (0 to 255); may be given several times.
    #[arg(long)]
    shard: Vec<u8>,
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
    /// Verify signatures by this public key in place of the key ring's; may be given several times.
    #[arg(long)]
    public_key: Vec<String>,
    /// A file of heads that were kept elsewhere, as `gpuaas audit heads` writes them.
    #[arg(long)]
    heads: Option<PathBuf>,
    /// How long a row may wait for its seal.
    #[arg(long, default_value_t = 10)]
    unsealed_after_seconds: u32,
    /// The NATS server with the archive of heads; without it the database is compared with --heads alone.
    #[arg(long, env = "SVC_NATS_URL", hide_env_values = true)]
    nats_url: Option<SecretString>,
    #[arg(long, env = "SVC_NATS_CA_PATH")]
    nats_ca: Option<PathBuf>,
    /// The copies of the archive.
    #[arg(long, env = "SVC_NATS_STREAM_REPLICAS", default_value_t = 1)]
    nats_stream_replicas: usize,
}

/// Runs the subcommand, and returns the result as an exit code.
pub async fn run(args: AuditArgs) -> ExitCode {
    exit_status::of_check(execute(args).await)
}

async fn execute(args: AuditArgs) -> anyhow::Result<bool> {
    let pool = database(&args).await?;
    let mut out = std::io::stdout().lock();
    match &args.what {
        AuditSubcommand::Verify(how) => verified(&args, how, &pool, &mut out).await,
        AuditSubcommand::Heads => {
            for head in Reads::new(pool).audit_heads().await? {
                writeln!(out, "{}", serde_json::to_string(&head)?)?;
            }
            Ok(true)
        }
        AuditSubcommand::Key => {
            writeln!(out, "{}", cluster_keys::audit_key(&secrets(&args, &pool)?).await?.public_key())?;
            Ok(true)
        }
        AuditSubcommand::Forget { month } => {
            let key = cluster_keys::audit_key(&secrets(&args, &pool)?).await?;
            let gone = drop_month(&pool, &key, month, Utc::now()).await?;
            writeln!(out, "{} is dropped; {} chains go on from a signed checkpoint", gone.month, gone.shards)?;
            Ok(true)
        }
    }
}

async fn database(args: &AuditArgs) -> anyhow::Result<PgPool> {
    let url = args.database_url.clone().context("SVC_DATABASE_URL is not set; it must name a postgres:// URL")?;
    let mut config = PoolConfig::new(url, args.database_ca.clone());
    (config.application_name, config.connections) = ("gpuaas audit".to_owned(), 2);
    Ok(pool::open_readable(&config).await?)
}

fn secrets(args: &AuditArgs, pool: &PgPool) -> anyhow::Result<Secrets> {
    let file = args.kek_file.as_ref().context("SVC_KEK_FILE is not set; it must name the key ring")?;
    let ring = KeyRing::load(file).context("SVC_KEK_FILE cannot be used")?;
    Ok(Secrets::new(pool.clone(), Arc::new(ring)))
}

async fn verified(args: &AuditArgs, how: &VerifyArgs, pool: &PgPool, out: &mut impl Write) -> anyhow::Result<bool> {
    let keys = if how.public_key.is_empty() {
        AuditKeys::of(&cluster_keys::audit_key(&secrets(args, pool)?).await?)
    } else {
        AuditKeys::parse(how.public_key.iter().map(String::as_str))?
    };
    let mut heads = match &how.heads {
        Some(file) => read_heads(file).await?,
        None => Vec::new(),
    };
    let mut strange = 0;
    if let Some(url) = &how.nats_url {
        let client = nats::connect(url, how.nats_ca.as_deref(), "gpuaas-audit").await?;
        let found =
            tokio::time::timeout(std::time::Duration::from_secs(30), archived(&client, how.nats_stream_replicas)).await;
        let (archived, none) = found.context("the archive of heads did not answer in time")??;
        heads.extend(archived);
        strange = none;
    }
    let shards = if how.shard.is_empty() { (0..=u8::MAX).collect() } else { how.shard.clone() };
    let what = AuditVerification {
        shards: shards.into_iter().map(Shard).collect(),
        keys,
        heads,
        unsealed_after: TimeDelta::seconds(i64::from(how.unsealed_after_seconds)),
        now: Utc::now(),
    };
    let report = verify(pool, &what).await.map_err(|error| {
        let source = error.source.to_string();
        anyhow::Error::new(error).context(source)
    })?;
    print_report(out, how.json, &report, what.heads.len(), strange)?;
    Ok(report.findings.is_empty() && strange == 0)
}

fn print_report(
    out: &mut impl Write,
    as_json: bool,
    report: &AuditReport,
    compared: usize,
    strange: u64,
) -> std::io::Result<()> {
    if as_json {
        let ok = report.findings.is_empty() && strange == 0;
        let answer = json!({
            "ok": ok,
            "findings": report.findings,
            "verified_rows": report.verified,
            "unsealed_rows": report.unsealed,
            "verified_heads": report.heads,
            "heads_kept_elsewhere": compared,
            "messages_in_the_archive_that_are_no_heads": strange,
        });
        return writeln!(out, "{answer:#}");
    }
    for finding in &report.findings {
        let place = match (finding.number, finding.epoch, finding.seq) {
            (Some(number), Some(epoch), Some(seq)) => format!("row {number} (epoch {epoch}, seq {seq})"),
            (Some(number), ..) => format!("row {number}"),
            (None, Some(epoch), Some(seq)) => format!("the row at epoch {epoch}, seq {seq}"),
            (None, ..) => "the chain".to_owned(),
        };
        let kind = serde_json::to_value(finding.kind).unwrap_or_default();
        writeln!(out, "shard {}: {place}: {}: {}", finding.shard, kind.as_str().unwrap_or_default(), finding.says)?;
    }
    if strange > 0 {
        writeln!(out, "the archive holds {strange} messages that are no heads")?;
    }
    let (verified, unsealed, heads) = (report.verified, report.unsealed, report.heads);
    writeln!(
        out,
        "{verified} rows verified, {unsealed} wait for their seal, {heads} signed heads hold ({compared} kept elsewhere)"
    )
}

async fn read_heads(file: &PathBuf) -> anyhow::Result<Vec<SignedHead>> {
    let text = tokio::fs::read_to_string(file).await.with_context(|| format!("cannot read {}", file.display()))?;
    let mut heads = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        match strict_json::from_str(line) {
            Ok(head) => heads.push(head),
            Err(error) => bail!("{}, line {number}: this is no signed head: {error}", file.display()),
        }
    }
    Ok(heads)
}
