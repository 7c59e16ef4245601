//! Recordings of terminal sessions: listing, downloading and playing them. The session's owner and administrators may read one, and each
//! read is audited.

#[cfg(test)]
mod fuzz;
mod play;

use crate::allocations;
use crate::api::{Api, Query};
use crate::completion;
use crate::download;
use crate::failure::Failure;
use crate::output::Column;
use crate::resource_ref::{self, RECORDING, Ref};
use crate::terminal::sessions::TerminalSelector;
use play::PlayArgs;
use std::path::PathBuf;
use uuid::Uuid;

const ASCIICAST: &str = "application/x-asciicast";
/// Its name in failures.
const WHAT: &str = "the recording";

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists the recordings of an allocation's terminals.
    #[command(visible_alias = "ls")]
    List(TerminalSelector),
    /// Shows one recording; its id is the session's.
    Show {
        #[arg(add = completion::of(&RECORDING))]
        recording: Ref,
    },
    /// Saves a recording in a file that asciinema and its players read (asciicast v2).
    Download {
        #[arg(add = completion::of(&RECORDING))]
        recording: Ref,
        /// The file, which must not be there; `-` is standard output. RECORDING.cast where it is left out.
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
    /// Plays a recording back in this terminal: space pauses, `q` ends it.
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
        Command::List(TerminalSelector { allocation, user, limit, .. }) => {
            let path = match allocation {
                Some(allocation) => {
                    format!("{}/recordings", allocations::path(resource_ref::allocation(&allocation, api).await?))
                }
                None => RECORDING.path.to_owned(),
            };
            let query: Query<'_> = user.into_iter().map(|user| ("user_id", user)).collect();
            api.out.list(&api.list(&path, &query, limit.into()).await?, &IN_A_LIST)
        }
        Command::Show { recording } => {
            api.out.show(&api.get(&path(recording.id(&RECORDING, api).await?), &[]).await?, &ALONE)
        }
        Command::Download { recording, to } => download(api, recording.id(&RECORDING, api).await?, to).await,
        Command::Play(args) => play::run(args, api).await,
    }
}

fn path(recording: Uuid) -> String {
    format!("/api/v1/recordings/{recording}")
}

/// The path of the recording as asciicast.
fn asciicast(recording: Uuid) -> String {
    format!("{}/asciicast", path(recording))
}

async fn download(api: &Api, recording: Uuid, to: Option<PathBuf>) -> Result<(), Failure> {
    let to = to.unwrap_or_else(|| PathBuf::from(format!("{recording}.cast")));
    download::save(api, &asciicast(recording), ASCIICAST, WHAT, &to).await
}
