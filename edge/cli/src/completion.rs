//! Dynamic shell completion: ids, names, SKUs and policy keys, as the API lists them for the logged-in profile.
//!
//! The shell runs this program with `GPUCTL_COMPLETE` set and the words so far after `--`. What cannot be listed before the timeout is not
//! offered, and no error is printed.

use crate::api::Api;
use crate::failure::Failure;
use crate::output::{Output, OutputFormat};
use crate::printable::plain;
use crate::resource_ref::{ALLOCATION, ResourceKind, items, label, live_allocations};
use crate::{Arguments, Common, Connection};
use clap::{CommandFactory as _, FromArgMatches as _};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::time::Duration;

/// The timeout of listing candidates: the user waits at the keyboard.
const LIST_TIMEOUT: Duration = Duration::from_secs(2);
/// The most candidates that are offered.
const MAX_CANDIDATES: usize = 200;

/// Completes ids and names of a kind.
pub(crate) fn of(kind: &'static ResourceKind) -> ArgValueCompleter {
    ArgValueCompleter::new(move |current: &OsStr| {
        completions_from(current, async |api: &Api| {
            let page = match kind.path {
                path if path == ALLOCATION.path => live_allocations(&Vec::new(), MAX_CANDIDATES, api).await?,
                path => api.list(path, &[], MAX_CANDIDATES).await?,
            };
            Ok(items(&page).iter().flat_map(|item| entries(kind, item)).collect())
        })
    })
}

/// Completes the names of active SKUs.
pub(crate) fn sku_names() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        completions_from(current, async |api: &Api| {
            named_entries(&api.list("/api/v1/skus", &[], MAX_CANDIDATES).await?, "name", "/gpu/model")
        })
    })
}

pub(crate) fn policy_keys() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        completions_from(current, async |api: &Api| {
            named_entries(&api.get("/api/v1/admin/policies", &[]).await?, "key", "/meaning")
        })
    })
}

/// A candidate and its description.
type Entry = (String, String);

fn entries(kind: &ResourceKind, item: &Value) -> Vec<Entry> {
    let label = label(kind, item);
    let names = kind.names.iter().filter_map(|name| item.pointer(name)?.as_str());
    let all = item["id"].as_str().into_iter().chain(names);
    all.map(|text| (plain(text), label.clone())).collect()
}

fn named_entries(page: &Value, name: &str, about: &str) -> Result<Vec<Entry>, Failure> {
    let entry = |item: &Value| Some((plain(item[name].as_str()?), item.pointer(about).map(crate::printable::cell)?));
    Ok(items(page).iter().filter_map(entry).collect())
}

fn completions_from(
    current: &OsStr,
    list: impl AsyncFnOnce(&Api) -> Result<Vec<Entry>, Failure>,
) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else { return Vec::new() };
    let Some(connection) = connection(std::env::args_os()) else { return Vec::new() };
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return Vec::new() };
    let entries = runtime.block_on(entries_in_time(&connection, list)).unwrap_or_default();
    candidates(current, entries)
}

/// `None` where there are none in time, or where the stored token has ended: a renewal that the timeout cuts off would lose the refresh token.
async fn entries_in_time(
    connection: &Connection,
    list: impl AsyncFnOnce(&Api) -> Result<Vec<Entry>, Failure>,
) -> Option<Vec<Entry>> {
    let listed = async {
        let api = connection.api().ok()?.without_renewal().await.ok()?;
        list(&api).await.ok()
    };
    tokio::time::timeout(LIST_TIMEOUT, listed).await.ok()?
}

fn candidates(current: &str, entries: Vec<Entry>) -> Vec<CompletionCandidate> {
    let fitting = entries.into_iter().filter(|(text, _)| text.starts_with(current));
    fitting.map(|(text, about)| CompletionCandidate::new(text).help(Some(about.into()))).collect()
}

/// The service and profile that the words so far name. The last word may be incomplete, and missing words are no error.
fn connection(words: impl Iterator<Item = OsString>) -> Option<Connection> {
    let words = words.skip_while(|word| word != "--").skip(1);
    let matches = Arguments::command().ignore_errors(true).try_get_matches_from(words).ok()?;
    let common = Common::from_arg_matches(&matches).ok()?;
    let mut connection = Connection::of(common).ok()?;
    connection.out = Output { format: OutputFormat::Table, quiet: true };
    Some(connection)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::login::login_store::Store;
    use crate::resource_ref::NODE;
    use axum::routing::{get, post};
    use axum::{Json, Router};
    use chrono::{DateTime, TimeDelta, Utc};
    use secrecy::ExposeSecret as _;
    use serde_json::json;

    #[test]
    fn matching_ids_and_names_are_completed_with_descriptions() {
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

    #[tokio::test]
    async fn completion_lists_with_the_stored_token_and_never_renews_it() {
        let renew =
            || async { Json(json!({ "access_token": "access-1", "refresh_token": "refresh-1", "expires_in": 600 })) };
        let skus = || async { Json(json!({ "items": [{ "name": "h100x8", "gpu": { "model": "H100" } }] })) };
        let routes = Router::new().route("/token", post(renew)).route("/api/v1/skus", get(skus));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path().to_owned(), "default").unwrap();
        let found_until = async |expires_at: DateTime<Utc>| {
            let login = json!({
                "server": server, "issuer": server, "token_endpoint": format!("{server}/token"), "client_id": "gpuctl",
                "access_token": "access-0", "refresh_token": "refresh-0", "expires_at": expires_at,
            });
            store.write(&serde_json::from_value(login).unwrap()).unwrap();
            let out = Output { format: OutputFormat::Table, quiet: true };
            let connection =
                Connection { server: None, ca_bundle: None, token: None, key: None, store: store.clone(), out };
            // Another process renews the login meanwhile.
            let _lock = store.lock(out);
            let list = async |api: &Api| named_entries(&api.list("/api/v1/skus", &[], 10).await?, "name", "/gpu/model");
            let found = entries_in_time(&connection, list).await;
            assert_eq!(store.read().unwrap().unwrap().refresh_token.unwrap().expose_secret(), "refresh-0");
            found
        };
        // The second ends sooner than a command would use it for.
        for left in [TimeDelta::hours(1), TimeDelta::seconds(15)] {
            assert_eq!(found_until(Utc::now() + left).await, Some(vec![("h100x8".to_owned(), "H100".to_owned())]));
        }
        assert_eq!(found_until(Utc::now() - TimeDelta::seconds(1)).await, None, "the token has ended");
    }

    #[test]
    fn arguments_before_the_cursor_select_the_profile() {
        let typed =
            ["gpuctl", "--", "gpuctl", "--profile", "admin", "--server", "https://gpu.example", "nodes", "show", "01"];
        let connection = connection(typed.into_iter().map(OsString::from));
        let profile = connection.map(|connection| connection.store.profile().to_owned());
        assert_eq!(profile.as_deref(), Some("admin"));
    }
}
