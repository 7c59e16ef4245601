//! `gpuaas support-bundle`: what a person who was not there needs to find a fault, in one archive without secrets. It is needed most when
//! nothing answers: each item has a limit of its own, and one that fails is named in the manifest.

mod anonymity;
mod archive;
mod bus;
mod database;
mod items;
mod machine;
mod redaction;
mod server_url;
mod service_api;

use crate::config::installed_settings::InstalledSettings;
use anonymity::Pseudonyms;
use anyhow::Context as _;
use archive::Bundle;
use chrono::Utc;
use items::{BundleItem, Collected};
use redaction::SecretScrubber;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The name of standard output and of standard input.
const STANDARD_STREAM: &str = "-";
/// The omission that stands for them.
const UNREAD_SECRETS: &str = "secrets";

/// Where the bundle goes, and what goes into it.
#[derive(Debug, clap::Args)]
pub struct SupportBundleArgs {
    /// The environment file of the service, as for `gpuaas doctor`.
    #[arg(long, value_name = "FILE")]
    env_file: Option<PathBuf>,
    /// The archive. Without it: gpuaas-support-TIME.tar.gz in this folder. A file that exists is not overwritten. `-` is standard output, where this
    /// user may write no file, as in a pod.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace names, e-mail addresses, ids, hosts and addresses, the same one always by the same text.
    #[arg(long)]
    anonymous: bool,
    /// A file with an access token of an administrator: with it the supervision tree and the members are asked of the public API.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// A file with the service's log, in place of the journal of its unit; its end is taken. `-` is standard input.
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,
    /// The unit whose journal is taken.
    #[arg(long, default_value = "gpuaas.service")]
    unit: String,
    /// How much of the log is taken, in hours.
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=720))]
    log_hours: u32,
    /// The bound on the whole content, in MiB, before compression.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1024))]
    max_mib: u64,
    /// The bound on the time to collect it, in seconds.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(5..=600))]
    timeout_seconds: u64,
    /// What Postgres has, and the names in it, without pseudonyms: for the command of another user, which goes on with it.
    #[arg(long, hide = true)]
    database_only: bool,
}

/// Collects, and writes the archive.
///
/// # Errors
/// Where the archive cannot be written. What cannot be collected is no error: the manifest names it.
pub async fn run(args: SupportBundleArgs) -> anyhow::Result<()> {
    let at = Utc::now();
    let output =
        args.output.clone().unwrap_or_else(|| format!("gpuaas-support-{}.tar.gz", at.format("%Y%m%dT%H%M%SZ")).into());
    let is_stdout = output == Path::new(STANDARD_STREAM);
    anyhow::ensure!(
        !is_stdout || !std::io::stdout().is_terminal(),
        "standard output is a terminal; send it to a file: gpuaas support-bundle --output - > bundle.tar.gz"
    );
    anyhow::ensure!(
        is_stdout || !output.exists(),
        "{} exists; name another file with --output, or remove it",
        output.display()
    );
    let settings = Arc::new(InstalledSettings::open(args.env_file.as_deref()));
    let (scrubber, unread) = SecretScrubber::of(&settings, args.token_file.as_deref()).await;
    let collected = collect(items::table(&settings, &args), Duration::from_secs(args.timeout_seconds)).await;
    let collected: Vec<Collected> = collected.into_iter().map(|item| item.scrubbed(&scrubber)).collect();
    let collected = match args.anonymous {
        true => {
            let mut pseudonyms = Pseudonyms::of(&settings);
            collected.iter().for_each(|item| pseudonyms.learn(item));
            // Where the names are not known, the manifest says so; where they are, they are no content.
            let shown = collected.into_iter().filter(|item| item.name != anonymity::NAMES || item.content.is_err());
            shown.map(|item| item.anonymous(&mut pseudonyms)).collect()
        }
        false => collected,
    };
    let mut bundle = Bundle::new(at, args.anonymous, args.max_mib * 1024 * 1024);
    collected.into_iter().for_each(|item| bundle.add(item));
    if !unread.is_empty() {
        let why = format!("the text of these is not taken out, since they cannot be read: {}", unread.join("; "));
        bundle.add(Collected::new(UNREAD_SECRETS, "files with secrets", Err(why)));
    }
    let (count, omitted) = (bundle.count(), bundle.omissions());
    let written = {
        let output = output.clone();
        let write = move || if is_stdout { bundle.write_to(std::io::stdout().lock()) } else { bundle.write(&output) };
        tokio::task::spawn_blocking(write).await.context("the archive's thread ended")?
    };
    let bytes = written?;
    let mut out: Box<dyn std::io::Write> =
        if is_stdout { Box::new(std::io::stderr()) } else { Box::new(std::io::stdout()) };
    let place = if is_stdout { "standard output".into() } else { output.display().to_string() };
    writeln!(out, "{place}: {count} files, {} KiB; manifest.json lists them", bytes.div_ceil(1024))?;
    for (name, reason) in omitted {
        writeln!(out, "  without {name}: {reason}")?;
    }
    writeln!(out, "It has no secret of the settings. Look through it before you pass it on.")?;
    Ok(())
}

/// All items at once, each within its limit, and together within this one. What hangs is left behind.
async fn collect(items: Vec<BundleItem>, limit: Duration) -> Vec<Collected> {
    let until = Instant::now() + limit;
    let running: Vec<_> = items
        .into_iter()
        .map(|item| {
            let BundleItem { name, what, limit, collect } = item;
            let until = until.min(Instant::now() + limit);
            (name, what, tokio::spawn(tokio::time::timeout_at(until, collect)))
        })
        .collect();
    let mut collected = Vec::new();
    for (name, what, running) in running {
        let content = match running.await {
            Ok(Ok(content)) => content,
            Ok(Err(_)) => Err("it did not answer in time".to_owned()),
            Err(_) => Err("collecting it failed; report this".to_owned()),
        };
        collected.push(Collected::new(name, what, content));
    }
    collected
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn item_that_hangs_or_fails_is_an_omission_and_the_others_are_there() {
        let item = |name, limit, collect| BundleItem { name, what: "a test", limit, collect };
        let (short, long) = (Duration::from_millis(20), Duration::from_secs(60));
        let items = vec![
            item("hangs.json", short, Box::pin(std::future::pending()) as items::Collecting),
            item("fails.json", long, Box::pin(async { Err("it is down".to_owned()) })),
            item("panics.json", long, Box::pin(async { unreachable!("a defect of the item") })),
            item("is-there.json", long, Box::pin(async { Ok(b"{}".to_vec()) })),
        ];
        let collected = collect(items, long).await;
        let results: Vec<_> =
            collected.iter().map(|it| (it.name, it.content.clone().map_err(|why| why.len() > 5))).collect();
        let expected = [
            ("hangs.json", Err(true)),
            ("fails.json", Err(true)),
            ("panics.json", Err(true)),
            ("is-there.json", Ok(b"{}".to_vec())),
        ];
        assert_eq!(results, expected);
    }
}
