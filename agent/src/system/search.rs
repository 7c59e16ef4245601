//! A search for what a tenant owns, among folders that others change meanwhile.
//!
//! A pass in which nothing changed has seen everything. What changed is searched again, for a bounded time: after that a neighbour's changes
//! in its own folders are reported and decide over nothing, or it could keep any release from its proof.

use std::collections::BTreeSet;
use std::io;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::mounts::Mounts;
use super::walk::{self, Entry, Scope, Trouble};

/// As many paths as a finding names.
const NAMED: usize = 20;
/// As many troubles as an error or a line of the log names.
const TROUBLES_NAMED: usize = 3;
const PASSES: usize = 8;
/// Passes after the first begin within this time.
const AGAIN_WITHIN: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(10);

/// What a search came to.
#[derive(Debug, Default)]
pub struct Searched {
    /// What the account owns; the first of it, where it is much.
    pub owned: Vec<PathBuf>,
    /// Where others' folders changed until the last pass.
    pub unsettled: Vec<Trouble>,
}

/// Searches `folders` for what `id` owns, at any depth, but not below what it owns: that goes with it.
///
/// # Errors
/// A place could not be looked at; the error names it and says why.
pub fn owned_by(id: u32, folders: impl Fn(&Mounts) -> Vec<PathBuf>) -> io::Result<Searched> {
    let (mut owners, mut until): (Option<BTreeSet<u32>>, _) = (None, None);
    for pass in 1_usize.. {
        // Anew each time: something may have been mounted meanwhile.
        let mounts = Mounts::of_this_machine()?;
        let mut owned = Vec::new();
        let note = |entry: &Entry<'_>| {
            owned.push(entry.path());
            if owned.len() < NAMED { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        let scope = Scope { id, owners: owners.as_ref() };
        let troubles = walk::owned_by(scope, &folders(&mounts), &mounts, note);
        let until = *until.get_or_insert_with(|| Instant::now() + AGAIN_WITHIN);
        let is_last = pass >= PASSES || Instant::now() >= until;
        if !owned.is_empty() || troubles.is_empty() || is_last {
            return judge(id, owned, troubles);
        }
        // What was seen in folders of the others holds: who did not change theirs has moved nothing into them.
        let changed: BTreeSet<u32> = troubles.iter().map(|trouble| trouble.owner).collect();
        let failed = troubles.iter().any(|trouble| matches!(trouble.cause, walk::Cause::Failed(_)));
        owners = (!failed).then_some(changed);
        thread::sleep(PAUSE);
    }
    Ok(Searched::default())
}

fn judge(id: u32, mut owned: Vec<PathBuf>, troubles: Vec<Trouble>) -> io::Result<Searched> {
    owned.sort();
    let (decisive, unsettled): (Vec<_>, Vec<_>) = troubles.into_iter().partition(|trouble| trouble.is_decisive(id));
    if !decisive.is_empty() && owned.is_empty() {
        let error = named(&decisive);
        warn!(uid = id, error_code = "search_failed", error, "what a tenant left cannot be searched for");
        return Err(io::Error::other(error));
    }
    if !unsettled.is_empty() {
        info!(uid = id, places = named(&unsettled), "folders of other accounts changed while they were searched");
    }
    Ok(Searched { owned, unsettled })
}

/// The first of them, each with its path and what the kernel said.
#[must_use]
pub fn named(troubles: &[Trouble]) -> String {
    let mut text: Vec<String> = troubles.iter().take(TROUBLES_NAMED).map(ToString::to_string).collect();
    if let Some(more @ 1..) = troubles.len().checked_sub(TROUBLES_NAMED) {
        text.push(format!("and {more} more"));
    }
    text.join("; ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::system::walk::Cause;
    use nix::errno::Errno;

    fn trouble(owner: u32, cause: Cause) -> Trouble {
        Trouble { path: "/tmp/n".into(), owner, cause }
    }

    #[test]
    fn search_that_failed_names_path_and_errno_and_one_that_others_disturbed_succeeds() {
        let failed = judge(7, Vec::new(), vec![trouble(8, Cause::Changed), trouble(0, Cause::Failed(Errno::EIO))]);
        assert_eq!(failed.unwrap_err().to_string(), "/tmp/n: EIO: I/O error");
        let disturbed = judge(7, Vec::new(), vec![trouble(8, Cause::Moved); 5]).unwrap();
        assert!(disturbed.owned.is_empty());
        assert!(named(&disturbed.unsettled).ends_with("; and 2 more"));
    }

    #[test]
    fn what_was_found_is_reported_whatever_could_not_be_searched() {
        let found = judge(7, vec!["/tmp/x".into()], vec![trouble(0, Cause::Failed(Errno::EIO))]).unwrap();
        assert_eq!(found.owned, [PathBuf::from("/tmp/x")]);
    }
}
