//! What a shell offers at the TAB key: ids, names, SKUs and policy keys, as the API lists them for the profile that is logged in.
//!
//! The shell runs this program with `COMPLETE` set and the words so far after `--`. What cannot be read in time is not offered, and
//! nothing is printed about it.

use crate::api::Api;
use crate::failure::Failure;
use crate::out::{Format, Out};
use crate::reference::{ALLOCATION, Kind, items, label, live_allocations};
use crate::text::plain;
use crate::{Arguments, Common, Connection};
use clap::{CommandFactory as _, FromArgMatches as _};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::time::Duration;

/// A person waits at the keyboard.
const WITHIN: Duration = Duration::from_secs(2);
/// How many entries of a list are offered.
const OFFERED: usize = 200;

/// Ids and names of a kind.
pub(crate) fn of(kind: &'static Kind) -> ArgValueCompleter {
    ArgValueCompleter::new(move |current: &OsStr| {
        listed(current, async |api: &Api| {
            let page = match kind.path {
                path if path == ALLOCATION.path => live_allocations(&Vec::new(), OFFERED, api).await?,
                path => api.list(path, &[], OFFERED).await?,
            };
            Ok(items(&page).iter().flat_map(|item| entries(kind, item)).collect())
        })
    })
}

/// The names of what can be rented.
pub(crate) fn sku_names() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        listed(current, async |api: &Api| named(&api.list("/api/v1/skus", &[], OFFERED).await?, "name", "/gpu/model"))
    })
}

pub(crate) fn policy_keys() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        listed(current, async |api: &Api| named(&api.get("/api/v1/admin/policies", &[]).await?, "key", "/meaning"))
    })
}

/// What could stand there, and a word about it.
type Entry = (String, String);

fn entries(kind: &Kind, item: &Value) -> Vec<Entry> {
    let label = label(kind, item);
    let names = kind.names.iter().filter_map(|name| item.pointer(name)?.as_str());
    let all = item["id"].as_str().into_iter().chain(names);
    all.map(|text| (plain(text), label.clone())).collect()
}

fn named(page: &Value, name: &str, about: &str) -> Result<Vec<Entry>, Failure> {
    let entry = |item: &Value| Some((plain(item[name].as_str()?), item.pointer(about).map(crate::text::cell)?));
    Ok(items(page).iter().filter_map(entry).collect())
}

fn listed(current: &OsStr, list: impl AsyncFnOnce(&Api) -> Result<Vec<Entry>, Failure>) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else { return Vec::new() };
    let Some(connection) = connection(std::env::args_os()) else { return Vec::new() };
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return Vec::new() };
    // A time-out needs the runtime already when it is made.
    let found =
        runtime.block_on(async { tokio::time::timeout(WITHIN, async { list(&connection.api()?).await }).await });
    let entries = found.ok().and_then(Result::ok).unwrap_or_default();
    candidates(current, entries)
}

fn candidates(current: &str, entries: Vec<Entry>) -> Vec<CompletionCandidate> {
    let fitting = entries.into_iter().filter(|(text, _)| text.starts_with(current));
    fitting.map(|(text, about)| CompletionCandidate::new(text).help(Some(about.into()))).collect()
}

/// The service and profile that the words so far name. The last word may be half of one, and what is missing is no error here.
fn connection(words: impl Iterator<Item = OsString>) -> Option<Connection> {
    let words = words.skip_while(|word| word != "--").skip(1);
    let matches = Arguments::command().ignore_errors(true).try_get_matches_from(words).ok()?;
    let common = Common::from_arg_matches(&matches).ok()?;
    let mut connection = Connection::of(common).ok()?;
    connection.out = Out { format: Format::Table, quiet: true };
    Some(connection)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::NODE;
    use serde_json::json;

    #[test]
    fn ids_and_names_that_fit_are_offered_with_what_they_are() {
        let node = json!({ "id": "0198f000", "host": "gpu-1.example", "state": "active\u{1b}[2J" });
        let offered = |current: &str| -> Vec<(String, String)> {
            let offered = candidates(current, entries(&NODE, &node)).into_iter();
            let text = |candidate: CompletionCandidate| {
                let help = candidate.get_help().map(ToString::to_string).unwrap_or_default();
                (candidate.get_value().to_string_lossy().into_owned(), help)
            };
            offered.map(text).collect()
        };
        assert_eq!(offered("").len(), 2);
        let about = "gpu-1.example active\u{fffd}[2J".to_owned();
        assert_eq!(offered("01"), [("0198f000".to_owned(), about.clone())]);
        assert_eq!(offered("gpu"), [("gpu-1.example".to_owned(), about)]);
        assert_eq!(offered("x"), []);
    }

    #[test]
    fn words_before_the_cursor_choose_the_profile() {
        let words =
            ["gpuctl", "--", "gpuctl", "--profile", "admin", "--server", "https://gpu.example", "nodes", "show", "01"];
        let connection = connection(words.into_iter().map(OsString::from));
        let profile = connection.map(|connection| connection.store.profile().to_owned());
        assert_eq!(profile.as_deref(), Some("admin"));
    }
}
