//! A search for the files of a tenant in folders that other users change at the same time.
//!
//! A pass without changes has seen everything. Changed folders are searched again, for a bounded time: after that, a neighbour's changes
//! in its own folders are reported but do not decide, otherwise a neighbour could keep any release from its proof.

use std::collections::BTreeSet;
use std::io;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::directory_walk::{self, SearchScope, WalkEntry, WalkError};
use super::mounts::Mounts;

/// The most paths that a finding names.
const NAMED: usize = 20;
/// The most errors that an error or a log line names.
const ERRORS_NAMED: usize = 3;
const PASSES: usize = 8;
/// Passes after the first start within this time.
const RESEARCH_WINDOW: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(10);

/// The result of a search.
#[derive(Debug, Default)]
pub struct SearchResult {
    /// What the account owns; the first of it, if it is much.
    pub owned: Vec<PathBuf>,
    /// Folders of other users that changed until the last pass.
    pub unsettled: Vec<WalkError>,
}

/// Searches `folders` for what `id` owns, at any depth, but not below it: that is removed with it.
///
/// # Errors
/// A path could not be searched; the error names it and says why.
pub fn owned_by(id: u32, folders: impl Fn(&Mounts) -> Vec<PathBuf>) -> io::Result<SearchResult> {
    let (mut owners, mut until): (Option<BTreeSet<u32>>, _) = (None, None);
    for pass in 1_usize.. {
        // Read for each pass: something may have been mounted meanwhile.
        let mounts = Mounts::of_this_machine()?;
        let mut owned = Vec::new();
        let note = |entry: &WalkEntry<'_>| {
            owned.push(entry.path());
            if owned.len() < NAMED { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        let scope = SearchScope { id, owners: owners.as_ref() };
        let errors = directory_walk::owned_by(scope, &folders(&mounts), &mounts, note);
        let until = *until.get_or_insert_with(|| Instant::now() + RESEARCH_WINDOW);
        let is_last = pass >= PASSES || Instant::now() >= until;
        if !owned.is_empty() || errors.is_empty() || is_last {
            return search_result(id, owned, errors);
        }
        // The results for unchanged folders of other users hold: an owner who changed nothing has moved nothing into them.
        let changed: BTreeSet<u32> = errors.iter().map(|error| error.owner).collect();
        let failed = errors.iter().any(|error| matches!(error.cause, directory_walk::WalkErrorCause::Failed(_)));
        owners = (!failed).then_some(changed);
        thread::sleep(PAUSE);
    }
    Ok(SearchResult::default())
}

fn search_result(id: u32, mut owned: Vec<PathBuf>, errors: Vec<WalkError>) -> io::Result<SearchResult> {
    owned.sort();
    let (decisive, unsettled): (Vec<_>, Vec<_>) = errors.into_iter().partition(|error| error.is_decisive(id));
    if !decisive.is_empty() && owned.is_empty() {
        let error = describe_errors(&decisive);
        warn!(uid = id, error_code = "search_failed", error, "what a tenant left cannot be searched for");
        return Err(io::Error::other(error));
    }
    if !unsettled.is_empty() {
        info!(
            uid = id,
            places = describe_errors(&unsettled),
            "folders of other accounts changed while they were searched"
        );
    }
    Ok(SearchResult { owned, unsettled })
}

/// The first of them, each with its path and the kernel's error.
#[must_use]
pub fn describe_errors(errors: &[WalkError]) -> String {
    let mut text: Vec<String> = errors.iter().take(ERRORS_NAMED).map(ToString::to_string).collect();
    if let Some(more @ 1..) = errors.len().checked_sub(ERRORS_NAMED) {
        text.push(format!("and {more} more"));
    }
    text.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system_executor::directory_walk::WalkErrorCause;
    use nix::errno::Errno;

    fn error(owner: u32, cause: WalkErrorCause) -> WalkError {
        WalkError { path: "/tmp/n".into(), owner, cause }
    }

    #[test]
    fn failed_search_names_path_and_errno_and_disturbed_search_succeeds() {
        let failed = search_result(
            7,
            Vec::new(),
            vec![error(8, WalkErrorCause::Changed), error(0, WalkErrorCause::Failed(Errno::EIO))],
        );
        assert_eq!(failed.unwrap_err().to_string(), "/tmp/n: EIO: I/O error");
        let disturbed = search_result(7, Vec::new(), vec![error(8, WalkErrorCause::Moved); 5]).unwrap();
        assert!(disturbed.owned.is_empty());
        assert!(describe_errors(&disturbed.unsettled).ends_with("; and 2 more"));
    }

    #[test]
    fn findings_are_reported_despite_search_errors() {
        let found =
            search_result(7, vec!["/tmp/x".into()], vec![error(0, WalkErrorCause::Failed(Errno::EIO))]).unwrap();
        assert_eq!(found.owned, [PathBuf::from("/tmp/x")]);
    }
}
