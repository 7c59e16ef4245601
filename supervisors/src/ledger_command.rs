//! `gpuaas ledger`: recomputes every balance from its postings.

use crate::exit_status;
use anyhow::Context;
use domain::money::{Currency, MicroAmount};
use persistence::Reads;
use persistence::pool::{self, PoolConfig};
use persistence::queries::LedgerReport;
use secrecy::SecretString;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// The subcommand of `gpuaas ledger`, and the database.
#[derive(Debug, clap::Args)]
pub struct LedgerArgs {
    #[command(subcommand)]
    what: LedgerSubcommand,
    #[arg(long, env = "SVC_DATABASE_URL", hide_env_values = true, global = true)]
    database_url: Option<SecretString>,
    /// The authorities that the database's certificate is verified with.
    #[arg(long, env = "SVC_DATABASE_CA_PATH", global = true)]
    database_ca: Option<PathBuf>,
}

#[derive(Debug, clap::Subcommand)]
enum LedgerSubcommand {
    /// Adds up every account's postings, and compares the sums with the accounts' balances. Exits with 0 where they agree, with 1 where
    /// they do not, with 2 where that is not known.
    Verify {
        /// Answer in JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Runs the subcommand, and returns the result as an exit code.
pub async fn run(args: LedgerArgs) -> ExitCode {
    exit_status::of_check(execute(args).await)
}

async fn execute(args: LedgerArgs) -> anyhow::Result<bool> {
    let url = args.database_url.context("SVC_DATABASE_URL is not set; it must name a postgres:// URL")?;
    let mut config = PoolConfig::new(url, args.database_ca);
    (config.application_name, config.connections) = ("gpuaas ledger".to_owned(), 1);
    let LedgerSubcommand::Verify { json } = args.what;
    let report = Reads::new(pool::open_readable(&config).await?).verify_ledger().await.map_err(|error| {
        let source = error.source.to_string();
        anyhow::Error::new(error).context(source)
    })?;
    print_report(&mut std::io::stdout().lock(), json, &report)?;
    Ok(report.holds())
}

fn print_report(out: &mut impl Write, as_json: bool, report: &LedgerReport) -> std::io::Result<()> {
    if as_json {
        let answer = json!({
            "ok": report.holds(),
            "accounts": report.accounts,
            "postings": report.postings,
            "difference_micro": report.difference(),
            "disagreements": report.disagreements,
            "books_micro": report.books,
        });
        return writeln!(out, "{answer:#}");
    }
    for found in &report.disagreements {
        let believed = found.believed.map_or_else(|| "nothing".to_owned(), |micro| MicroAmount::of(micro).to_string());
        writeln!(
            out,
            "account {}: it believes to have {believed} after {} postings; the sum of its {} postings is {}, {} of them out of line",
            found.account,
            found.believed_postings.unwrap_or(0),
            found.postings,
            MicroAmount::of(found.entries),
            found.out_of_line
        )?;
    }
    for (currency, books) in &report.books {
        let known = Currency::parse(currency).ok();
        let shown = |micro: i64| match &known {
            Some(known) => MicroAmount::of(micro).in_currency(known),
            None => format!("{} minor units", MicroAmount::of(micro)),
        };
        let books: Vec<_> = books.iter().map(|(book, micro)| format!("{book} {}", shown(*micro))).collect();
        writeln!(out, "{currency}: {}", books.join(", "))?;
    }
    let (accounts, postings) = (report.accounts, report.postings);
    writeln!(
        out,
        "{postings} postings of {accounts} accounts were added up: the difference is {}",
        MicroAmount::of(report.difference())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn database_that_cannot_be_reached_is_named() {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let args = LedgerArgs {
            what: LedgerSubcommand::Verify { json: false },
            database_url: Some("postgres://gpuaas:hunter2@127.0.0.1:1/gpuaas".into()),
            database_ca: None,
        };
        let error = execute(args).await.expect_err("nothing listens there");
        let text = format!("{error:#}");
        assert!(text.starts_with("the database at 127.0.0.1:1/gpuaas cannot be reached: "), "{text}");
        assert!(text.contains("refused") && !text.contains("hunter2"), "{text}");
    }
}
