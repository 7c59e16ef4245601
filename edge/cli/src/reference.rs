//! What a command is told to act on: a whole id, the beginning of one id alone, or a name.
//!
//! A whole id is taken as it is. Anything else is looked up in the list that the API has of its kind, and has to match one entry.

use crate::api::{Api, Query};
use crate::failure::{Ended, Failure};
use crate::text::{cell, plain};
use serde_json::{Value, json};
use std::fmt;
use std::str::FromStr;
use uuid::Uuid;

/// The longest name of anything in the service.
const LONGEST: usize = 255;
/// A shorter beginning of an id is more likely a slip.
const SHORTEST_PREFIX: usize = 4;
/// How many entries of a list are searched.
const SEARCHED: usize = 10_000;
/// How many candidates an error names.
const LISTED: usize = 8;

/// A kind of thing that has ids.
#[derive(Debug)]
pub(crate) struct Kind {
    /// As messages call it.
    pub(crate) noun: &'static str,
    /// The command that lists them.
    pub(crate) listed_by: &'static str,
    /// Where the API lists them.
    pub(crate) path: &'static str,
    /// The fields that name one, beside `id`.
    pub(crate) names: &'static [&'static str],
    /// The fields by which a person tells two of them apart.
    pub(crate) shown: &'static [&'static str],
}

pub(crate) const ALLOCATION: Kind = Kind {
    noun: "allocation",
    listed_by: "gpuctl allocations list --all",
    path: "/api/v1/allocations",
    names: &["/name"],
    shown: &["/name", "/sku", "/state"],
};
pub(crate) const NODE: Kind = Kind {
    noun: "node",
    listed_by: "gpuctl nodes list",
    path: "/api/v1/admin/nodes",
    names: &["/name", "/host"],
    shown: &["/name", "/host", "/state"],
};
pub(crate) const SKU: Kind = Kind {
    noun: "SKU",
    listed_by: "gpuctl skus list --all",
    path: "/api/v1/admin/skus",
    names: &["/name"],
    shown: &["/name", "/status"],
};
pub(crate) const SSH_KEY: Kind = Kind {
    noun: "SSH key",
    listed_by: "gpuctl ssh-keys list",
    path: "/api/v1/ssh-keys",
    names: &["/name"],
    shown: &["/name", "/fingerprint"],
};
pub(crate) const SERVICE_ACCOUNT: Kind = Kind {
    noun: "service account",
    listed_by: "gpuctl service-accounts list",
    path: "/api/v1/service-accounts",
    names: &["/name"],
    shown: &["/name"],
};
pub(crate) const PAYMENT: Kind = Kind {
    noun: "payment",
    listed_by: "gpuctl billing payments",
    path: "/api/v1/billing/payments",
    names: &[],
    shown: &["/state", "/created_at"],
};
pub(crate) const ACCOUNT: Kind = Kind {
    noun: "billing account",
    listed_by: "gpuctl billing accounts",
    path: "/api/v1/admin/billing/accounts",
    names: &["/user_id", "/org_id"],
    shown: &["/user_id", "/org_id"],
};
pub(crate) const PROCESSOR_EVENT: Kind = Kind {
    noun: "processor event",
    listed_by: "gpuctl processor-events list",
    path: "/api/v1/admin/billing/processor-events",
    names: &["/event_id"],
    shown: &["/event_id", "/state"],
};
pub(crate) const NOTIFICATION_ENDPOINT: Kind = Kind {
    noun: "notification endpoint",
    listed_by: "gpuctl notification-endpoints list",
    path: "/api/v1/notification-endpoints",
    names: &["/url", "/address"],
    shown: &["/kind", "/url", "/address"],
};
/// Of everybody: administrators alone read that list.
pub(crate) const TERMINAL_SESSION: Kind = Kind {
    noun: "terminal session",
    listed_by: "gpuctl terminal sessions list --all",
    path: "/api/v1/admin/terminal-sessions",
    names: &[],
    shown: &["/user_id", "/state"],
};
/// Of everybody: administrators alone read that list.
pub(crate) const RECORDING: Kind = Kind {
    noun: "recording",
    listed_by: "gpuctl recordings list",
    path: "/api/v1/admin/recordings",
    names: &[],
    shown: &["/user_id", "/created_at"],
};

/// What stands on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ref(String);

impl FromStr for Ref {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let good = !text.trim().is_empty() && text.chars().count() <= LONGEST && !text.chars().any(char::is_control);
        good.then(|| Self(text.to_owned())).ok_or("an id, the beginning of one, or a name of up to 255 characters")
    }
}

impl fmt::Display for Ref {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Ref {
    /// The id that is meant.
    pub(crate) async fn id(&self, kind: &Kind, api: &Api) -> Result<Uuid, Failure> {
        self.id_in(kind, kind.path, api).await
    }

    /// The same, among those that the API lists at `path`.
    pub(crate) async fn id_in(&self, kind: &Kind, path: &str, api: &Api) -> Result<Uuid, Failure> {
        if let Ok(id) = self.0.parse() {
            return Ok(id);
        }
        let page = api.list(path, &[], SEARCHED).await.map_err(|failure| self.unlisted(kind, failure))?;
        if !page["next_page"].is_null() {
            let why = format!("there are over {SEARCHED} {}s, too many to search for `{self}`", kind.noun);
            return Err(Failure::usage(why).next("Give the whole id."));
        }
        self.among(kind, items(&page))
    }

    /// The id that is meant among these.
    pub(crate) fn among(&self, kind: &Kind, items: &[Value]) -> Result<Uuid, Failure> {
        if let Ok(id) = self.0.parse() {
            return Ok(id);
        }
        // Users choose names, and administrators act on everybody's allocations: one that is called as another's id begins is no better
        // than that other.
        let fits = |item: &&Value| self.names(kind, item) || self.begins(item);
        let found: Vec<&Value> = items.iter().filter(fits).collect();
        match found[..] {
            [] => Err(self.unknown(kind)),
            [one] => id_of(one, kind),
            _ => Err(self.ambiguous(kind, &found)),
        }
    }

    fn names(&self, kind: &Kind, item: &Value) -> bool {
        kind.names.iter().any(|name| item.pointer(name).and_then(Value::as_str) == Some(&self.0))
    }

    fn begins(&self, item: &Value) -> bool {
        let id = item["id"].as_str().unwrap_or_default();
        self.0.len() >= SHORTEST_PREFIX && id.starts_with(&self.0.to_ascii_lowercase())
    }

    fn unknown(&self, kind: &Kind) -> Failure {
        let (noun, listed_by) = (kind.noun, kind.listed_by);
        Failure::new(Ended::NotFound, format!("there is no {noun} whose id begins with `{self}` or that is called so"))
            .next(format!("{listed_by} shows what there is; {SHORTEST_PREFIX} characters of an id are the fewest."))
    }

    fn ambiguous(&self, kind: &Kind, found: &[&Value]) -> Failure {
        let shown = found.iter().take(LISTED).map(|item| candidate(kind, item)).collect::<Vec<_>>().join(", ");
        let more = if found.len() > LISTED { ", and others" } else { "" };
        let (count, noun) = (found.len(), kind.noun);
        Failure::usage(format!("`{self}` fits {count} {noun}s: {shown}{more}")).next("Give more of the id.")
    }

    /// What is looked up in a list that the caller may not read.
    fn unlisted(&self, kind: &Kind, failure: Failure) -> Failure {
        if failure.ended != Ended::Forbidden {
            return failure;
        }
        let noun = kind.noun;
        Failure::new(Ended::Forbidden, format!("`{self}` is no whole id, and you may not read the list of all {noun}s"))
            .next(format!("Give the whole id of the {noun}."))
    }
}

/// The entries of a list's answer.
pub(crate) fn items(page: &Value) -> &[Value] {
    page["items"].as_array().map_or(&[], Vec::as_slice)
}

fn id_of(item: &Value, kind: &Kind) -> Result<Uuid, Failure> {
    let id = item["id"].as_str().and_then(|id| id.parse().ok());
    id.ok_or_else(|| Failure::new(Ended::Server, format!("the server lists a {} without an id", kind.noun)))
}

fn candidate(kind: &Kind, item: &Value) -> String {
    format!("{} ({})", cell(&item["id"]), label(kind, item))
}

/// By what a person knows it.
pub(crate) fn label(kind: &Kind, item: &Value) -> String {
    let known = kind.shown.iter().filter_map(|field| item.pointer(field).filter(|value| !value.is_null()));
    plain(&known.map(cell).collect::<Vec<_>>().join(" "))
}

/// Several of a kind, each looked up.
pub(crate) async fn ids(refs: &[Ref], kind: &Kind, api: &Api) -> Result<Vec<Uuid>, Failure> {
    let mut ids = Vec::with_capacity(refs.len());
    for reference in refs {
        ids.push(reference.id(kind, api).await?);
    }
    Ok(ids)
}

/// Allocations: those that have not ended come first, so that the ids of old ones stand in nobody's way.
pub(crate) async fn allocation(reference: &Ref, api: &Api) -> Result<Uuid, Failure> {
    if let Ok(id) = reference.0.parse() {
        return Ok(id);
    }
    let live = live_allocations(&Vec::new(), SEARCHED, api).await?;
    match reference.among(&ALLOCATION, items(&live)) {
        Err(failure) if failure.ended == Ended::NotFound => reference.id(&ALLOCATION, api).await,
        found => found,
    }
}

/// The states of an allocation that has not ended.
const LIVE: [&str; 5] = ["requested", "provisioning", "active", "releasing", "release_failed"];

/// Those that have not ended, up to `limit` of each state: the API lists by one state.
pub(crate) async fn live_allocations(query: &Query<'_>, limit: usize, api: &Api) -> Result<Value, Failure> {
    let mut all = Vec::new();
    let mut more = Value::Null;
    for state in LIVE {
        let mut query = query.clone();
        query.push(("state", state.to_owned()));
        let mut page = api.list(ALLOCATION.path, &query, limit).await?;
        all.extend(page["items"].as_array_mut().map(std::mem::take).unwrap_or_default());
        if !page["next_page"].is_null() {
            more = page["next_page"].take();
        }
    }
    Ok(json!({ "items": all, "next_page": more }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn nodes() -> Vec<Value> {
        vec![
            json!({ "id": "0198f000-0000-7000-8000-00000000000a", "host": "gpu-1.example", "state": "active" }),
            json!({ "id": "0198f000-0000-7000-8000-00000000000b", "host": "gpu-2.example", "state": "offline" }),
            json!({ "id": "0299f000-0000-7000-8000-00000000000c", "host": "0198", "state": "active" }),
        ]
    }

    fn found(text: &str) -> Result<String, Failure> {
        text.parse::<Ref>().unwrap().among(&NODE, &nodes()).map(|id| id.to_string())
    }

    #[test]
    fn whole_id_name_and_unique_prefix_find_the_same_node() {
        let id = "0198f000-0000-7000-8000-00000000000b";
        for text in [id, "gpu-2.example", "0198f000-0000-7000-8000-00000000000B"] {
            assert_eq!(found(text).unwrap(), id, "{text}");
        }
        assert_eq!(found("0299").unwrap(), "0299f000-0000-7000-8000-00000000000c");
        let unlisted = "0300f000-0000-7000-8000-00000000000d";
        assert_eq!(found(unlisted).unwrap(), unlisted, "the server says whether a whole id exists");
    }

    #[test]
    fn ambiguous_prefix_lists_the_candidates() {
        let failure = found("0198f").unwrap_err();
        assert_eq!(failure.ended, Ended::Usage);
        for part in ["fits 2 nodes", "00000000000a (gpu-1.example active)", "00000000000b (gpu-2.example offline)"] {
            assert!(failure.message.contains(part), "{failure}");
        }
    }

    #[test]
    fn name_that_is_the_beginning_of_another_id_is_ambiguous() {
        let failure = found("0198").unwrap_err();
        assert_eq!(failure.ended, Ended::Usage);
        assert!(failure.message.contains("fits 3 nodes"), "{failure}");
    }

    #[test]
    fn name_finds_what_has_it_alone_and_is_ambiguous_where_two_have_it() {
        let named = |id: &str, name: &str| json!({ "id": id, "name": name, "sku": "h100", "state": "active" });
        let ids = ["0198f000-0000-7000-8000-00000000000a", "0198f000-0000-7000-8000-00000000000b"];
        let found = |text: &str, second: &str| {
            text.parse::<Ref>().unwrap().among(&ALLOCATION, &[named(ids[0], "train"), named(ids[1], second)])
        };
        assert_eq!(found("train", "serve").unwrap().to_string(), ids[0]);
        assert_eq!(found("train", "train").unwrap_err().ended, Ended::Usage);
        assert_eq!(found(ids[1], "train").unwrap().to_string(), ids[1]);
    }

    #[test]
    fn unknown_or_too_short_prefix_is_not_found() {
        for text in ["0299a", "02", "gpu-9.example"] {
            let failure = found(text).unwrap_err();
            assert_eq!(failure.ended, Ended::NotFound, "{text}");
            assert!(failure.next.unwrap().contains("gpuctl nodes list"));
        }
        for bad in ["", " ", "a\nb"] {
            assert!(bad.parse::<Ref>().is_err(), "{bad:?}");
        }
    }
}
