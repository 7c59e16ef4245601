//! Recordings of terminals: what a session showed, found, kept in a file and played back. Its owner and administrators read it, and each
//! reading is audited.

mod play;
mod tame;

use crate::allocations;
use crate::api::{Api, Query};
use crate::failure::{Ended, Failure, chain};
use crate::out::{Column, Out};
use play::PlayArgs;
use reqwest::Response;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use uuid::Uuid;

/// Whoever says nothing for so long in the middle of a recording is gone.
const SILENT_AFTER: Duration = Duration::from_secs(30);

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// The recordings of an allocation's terminals.
    #[command(visible_alias = "ls")]
    List {
        #[arg(required_unless_present = "all")]
        allocation: Option<Uuid>,
        /// Administrators: everybody's.
        #[arg(long, conflicts_with = "allocation")]
        all: bool,
        /// Administrators: this user's.
        #[arg(long, value_name = "ID", requires = "all")]
        user: Option<String>,
        /// At most so many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// What there is of one; its id is the session's.
    Show { recording: Uuid },
    /// Keeps one in a file that asciinema and its players read (asciicast v2).
    Download {
        recording: Uuid,
        /// The file, which must not be there; `-` is standard output. RECORDING.cast where it is left out.
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
    /// Plays one back in this terminal: space pauses, `q` ends it.
    Play(PlayArgs),
}

const IN_A_LIST: [Column; 7] = [
    ("ID", "/id"),
    ("USER", "/user_id"),
    ("ALLOCATION", "/allocation_id"),
    ("BEGAN", "/created_at"),
    ("MILLISECONDS", "/duration_ms"),
    ("BYTES", "/bytes"),
    ("COMPLETE", "/complete"),
];

const ALONE: [Column; 10] = [
    ("id", "/id"),
    ("user", "/user_id"),
    ("allocation", "/allocation_id"),
    ("node", "/node_id"),
    ("began", "/created_at"),
    ("last part", "/updated_at"),
    ("milliseconds", "/duration_ms"),
    ("bytes", "/bytes"),
    ("bytes lost", "/lost_bytes"),
    ("complete", "/complete"),
];

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { allocation, user, limit, .. } => {
            let path = match allocation {
                Some(allocation) => format!("{}/recordings", allocations::path(allocation)),
                None => "/api/v1/admin/recordings".to_owned(),
            };
            let query: Query<'_> = user.into_iter().map(|user| ("user_id", user)).collect();
            api.out.list(&api.list(&path, &query, limit.into()).await?, &IN_A_LIST)
        }
        Command::Show { recording } => api.out.show(&api.get(&path(recording), &[]).await?, &ALONE),
        Command::Download { recording, to } => download(api, recording, to).await,
        Command::Play(args) => play::run(args, api).await,
    }
}

fn path(recording: Uuid) -> String {
    format!("/api/v1/recordings/{recording}")
}

/// The recording as asciicast, from its beginning.
async fn asciicast(api: &Api, recording: Uuid) -> Result<Response, Failure> {
    api.open(&format!("{}/asciicast", path(recording)), "application/x-asciicast").await
}

/// What comes next of it; `None` at its end.
async fn more(answer: &mut Response) -> Result<Option<Vec<u8>>, Failure> {
    let cut = |why: String| Failure::new(Ended::Network, format!("the recording was cut off: {why}"));
    let chunk = tokio::time::timeout(SILENT_AFTER, answer.chunk()).await;
    let chunk = chunk.map_err(|_| cut("nothing more comes".to_owned()))?;
    Ok(chunk.map_err(|error| cut(chain(&error)))?.map(Into::into))
}

async fn download(api: &Api, recording: Uuid, to: Option<PathBuf>) -> Result<(), Failure> {
    let to = to.unwrap_or_else(|| PathBuf::from(format!("{recording}.cast")));
    let mut answer = asciicast(api, recording).await?;
    if to.as_os_str() == "-" {
        return keep(&mut answer, &mut io::stdout().lock()).await.map(drop);
    }
    let unkept = |error: io::Error| Failure::usage(format!("{}: {error}", to.display()));
    // What a terminal showed may be a secret; and nothing of yours is written over.
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&to).map_err(unkept)?;
    match keep(&mut answer, &mut file).await {
        Ok(bytes) => said(api.out, &to, bytes),
        Err(failure) => {
            // Half a recording looks like a whole one.
            let _ = std::fs::remove_file(&to);
            Err(failure)
        }
    }
}

fn said(out: Out, to: &Path, bytes: u64) -> Result<(), Failure> {
    let kept = serde_json::json!({ "file": to, "bytes": bytes });
    out.done(&kept, &format!("{} has {bytes} bytes.", to.display()))
}

async fn keep(answer: &mut Response, into: &mut impl Write) -> Result<u64, Failure> {
    let failed = |error: io::Error| Failure::new(Ended::Failed, format!("the recording cannot be written: {error}"));
    let mut bytes = 0;
    while let Some(chunk) = more(answer).await? {
        into.write_all(&chunk).map_err(failed)?;
        bytes += chunk.len() as u64;
    }
    into.flush().map_err(failed)?;
    Ok(bytes)
}
