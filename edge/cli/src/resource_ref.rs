//! References to resources on the command line: a whole id, a unique prefix of one, or a name.
//!
//! A whole id is taken as it is. Any other text is looked up in the API's list of the kind, and must match one entry.

use crate::api::{Api, Query};
use crate::failure::{ExitStatus, Failure};
use crate::printable::{cell, plain};
use serde_json::{Value, json};
use std::fmt;
use std::str::FromStr;
use uuid::Uuid;

/// The longest name of a resource.
const MAX_NAME_LEN: usize = 255;
/// A shorter prefix of an id is more likely a typing error.
const SHORTEST_PREFIX: usize = 4;
/// The most entries of a list that are searched.
const MAX_SEARCHED: usize = 10_000;
/// The most candidates that an error names.
const MAX_CANDIDATES_LISTED: usize = 8;

/// A kind of resource that has ids.
#[derive(Debug)]
pub(crate) struct ResourceKind {
    /// Its name in messages.
    pub(crate) noun: &'static str,
    /// The command that lists them.
    pub(crate) listed_by: &'static str,
    /// Where the API lists them.
    pub(crate) path: &'static str,
    /// The fields that name one, beside `id`.
    pub(crate) names: &'static [&'static str],
    /// The fields that describe one to the user.
    pub(crate) shown: &'static [&'static str],
}

pub(crate) const ALLOCATION: ResourceKind = ResourceKind {
    noun: "allocation",
    listed_by: "gpuctl allocations list --all",
    path: "/api/v1/allocations",
    names: &["/name"],
    shown: &["/name", "/sku", "/state"],
};
pub(crate) const NODE: ResourceKind = ResourceKind {
    noun: "node",
    listed_by: "gpuctl nodes list",
    path: "/api/v1/admin/nodes",
    names: &["/name", "/host"],
    shown: &["/name", "/host", "/state"],
};
pub(crate) const ROLLOUT: ResourceKind = ResourceKind {
    noun: "rollout",
    listed_by: "gpuctl rollouts list",
    path: "/api/v1/admin/rollouts",
    names: &[],
    shown: &["/state", "/digest"],
};
pub(crate) const SKU: ResourceKind = ResourceKind {
    noun: "SKU",
    listed_by: "gpuctl skus list --all",
    path: "/api/v1/admin/skus",
    names: &["/name"],
    shown: &["/name", "/status"],
};
pub(crate) const SSH_KEY: ResourceKind = ResourceKind {
    noun: "SSH key",
    listed_by: "gpuctl ssh-keys list",
    path: "/api/v1/ssh-keys",
    names: &["/name"],
    shown: &["/name", "/fingerprint"],
};
pub(crate) const SERVICE_ACCOUNT: ResourceKind = ResourceKind {
    noun: "service account",
    listed_by: "gpuctl service-accounts list",
    path: "/api/v1/service-accounts",
    names: &["/name"],
    shown: &["/name"],
};
pub(crate) const PAYMENT: ResourceKind = ResourceKind {
    noun: "payment",
    listed_by: "gpuctl billing payments",
    path: "/api/v1/billing/payments",
    names: &[],
    shown: &["/state", "/created_at"],
};
pub(crate) const ACCOUNT: ResourceKind = ResourceKind {
    noun: "billing account",
    listed_by: "gpuctl billing accounts",
    path: "/api/v1/admin/billing/accounts",
    names: &["/user_id", "/org_id"],
    shown: &["/user_id", "/org_id"],
};
pub(crate) const PROCESSOR_EVENT: ResourceKind = ResourceKind {
    noun: "processor event",
    listed_by: "gpuctl processor-events list",
    path: "/api/v1/admin/billing/processor-events",
    names: &["/event_id"],
    shown: &["/event_id", "/state"],
};
pub(crate) const NOTIFICATION_ENDPOINT: ResourceKind = ResourceKind {
    noun: "notification endpoint",
    listed_by: "gpuctl notification-endpoints list",
    path: "/api/v1/notification-endpoints",
    names: &["/url", "/address"],
    shown: &["/kind", "/url", "/address"],
};
/// The sessions of all users: administrators alone read that list.
pub(crate) const TERMINAL_SESSION: ResourceKind = ResourceKind {
    noun: "terminal session",
    listed_by: "gpuctl terminal sessions list --all",
    path: "/api/v1/admin/terminal-sessions",
    names: &[],
    shown: &["/user_id", "/state"],
};
/// The recordings of all users: administrators alone read that list.
pub(crate) const RECORDING: ResourceKind = ResourceKind {
    noun: "recording",
    listed_by: "gpuctl recordings list",
    path: "/api/v1/admin/recordings",
    names: &[],
    shown: &["/user_id", "/created_at"],
};

/// A reference as it is on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ref(String);

impl FromStr for Ref {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let good =
            !text.trim().is_empty() && text.chars().count() <= MAX_NAME_LEN && !text.chars().any(char::is_control);
        good.then(|| Self(text.to_owned())).ok_or("an id, the beginning of one, or a name of up to 255 characters")
    }
}

impl fmt::Display for Ref {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Ref {
    /// The id, where the reference is a whole one.
    pub(crate) fn whole(&self) -> Option<Uuid> {
        self.0.parse().ok()
    }

    /// Resolves the reference to an id.
    pub(crate) async fn id(&self, kind: &ResourceKind, api: &Api) -> Result<Uuid, Failure> {
        self.id_in(kind, kind.path, api).await
    }

    /// Resolves it among the resources that the API lists at `path`.
    pub(crate) async fn id_in(&self, kind: &ResourceKind, path: &str, api: &Api) -> Result<Uuid, Failure> {
        if let Ok(id) = self.0.parse() {
            return Ok(id);
        }
        let page = api.list(path, &[], MAX_SEARCHED).await.map_err(|failure| self.unlisted(kind, failure))?;
        if !page["next_page"].is_null() {
            let why = format!("there are over {MAX_SEARCHED} {}s, too many to search for `{self}`", kind.noun);
            return Err(Failure::usage(why).next("Give the whole id."));
        }
        self.resolve_among(kind, items(&page))
    }

    /// Resolves it among these resources.
    pub(crate) fn resolve_among(&self, kind: &ResourceKind, items: &[Value]) -> Result<Uuid, Failure> {
        if let Ok(id) = self.0.parse() {
            return Ok(id);
        }
        // Users choose names, and administrators act on all allocations: a name that equals a prefix of another's id is ambiguous with
        // that id.
        let fits = |item: &&Value| self.matches_name(kind, item) || self.matches_prefix(item);
        let found: Vec<&Value> = items.iter().filter(fits).collect();
        // A removed node does not keep its name from a new one.
        let present: Vec<&Value> = found.iter().copied().filter(|item| item["state"] != REMOVED).collect();
        match (&found[..], &present[..]) {
            ([], _) => Err(self.unknown(kind)),
            ([one], _) | (_, [one]) => id_of(one, kind),
            _ => Err(self.ambiguous(kind, &found)),
        }
    }

    fn matches_name(&self, kind: &ResourceKind, item: &Value) -> bool {
        kind.names.iter().any(|name| item.pointer(name).and_then(Value::as_str) == Some(&self.0))
    }

    fn matches_prefix(&self, item: &Value) -> bool {
        let id = item["id"].as_str().unwrap_or_default();
        self.0.len() >= SHORTEST_PREFIX && id.starts_with(&self.0.to_ascii_lowercase())
    }

    fn unknown(&self, kind: &ResourceKind) -> Failure {
        let (noun, listed_by) = (kind.noun, kind.listed_by);
        Failure::new(
            ExitStatus::NotFound,
            format!("there is no {noun} whose id begins with `{self}` or that is called so"),
        )
        .next(format!("{listed_by} shows what there is; {SHORTEST_PREFIX} characters of an id are the fewest."))
    }

    fn ambiguous(&self, kind: &ResourceKind, found: &[&Value]) -> Failure {
        let shown =
            found.iter().take(MAX_CANDIDATES_LISTED).map(|item| candidate(kind, item)).collect::<Vec<_>>().join(", ");
        let more = if found.len() > MAX_CANDIDATES_LISTED { ", and others" } else { "" };
        let (count, nouns) = (found.len(), plural(kind.noun));
        Failure::usage(format!("`{self}` fits {count} {nouns}: {shown}{more}")).next("Give more of the id.")
    }

    /// The failure where the caller may not read the list.
    fn unlisted(&self, kind: &ResourceKind, failure: Failure) -> Failure {
        if failure.exit_status != ExitStatus::Forbidden {
            return failure;
        }
        let noun = kind.noun;
        Failure::new(
            ExitStatus::Forbidden,
            format!("`{self}` is no whole id, and you may not read the list of all {noun}s"),
        )
        .next(format!("Give the whole id of the {noun}."))
    }
}

fn plural(noun: &str) -> String {
    noun.strip_suffix("ity").map_or_else(|| format!("{noun}s"), |stem| format!("{stem}ities"))
}

/// The entries of a list's answer.
pub(crate) fn items(page: &Value) -> &[Value] {
    page["items"].as_array().map_or(&[], Vec::as_slice)
}

fn id_of(item: &Value, kind: &ResourceKind) -> Result<Uuid, Failure> {
    let id = item["id"].as_str().and_then(|id| id.parse().ok());
    id.ok_or_else(|| Failure::unusable_answer(format!("the server lists a {} without an id", kind.noun)))
}

fn candidate(kind: &ResourceKind, item: &Value) -> String {
    format!("{} ({})", cell(&item["id"]), label(kind, item))
}

/// A short description of a resource for the user.
pub(crate) fn label(kind: &ResourceKind, item: &Value) -> String {
    let known = kind.shown.iter().filter_map(|field| item.pointer(field).filter(|value| !value.is_null()));
    plain(&known.map(cell).collect::<Vec<_>>().join(" "))
}

/// Resolves several references of a kind.
pub(crate) async fn ids(refs: &[Ref], kind: &ResourceKind, api: &Api) -> Result<Vec<Uuid>, Failure> {
    let mut ids = Vec::with_capacity(refs.len());
    for reference in refs {
        ids.push(reference.id(kind, api).await?);
    }
    Ok(ids)
}

/// Resolves a billing account. A whole id may be the account's, or that of the user or the organisation whose account it is.
pub(crate) async fn account(reference: &Ref, api: &Api) -> Result<Uuid, Failure> {
    let Ok(id) = reference.0.parse() else { return reference.id(&ACCOUNT, api).await };
    for holder in ["user_id", "org_id"] {
        match api.list(ACCOUNT.path, &[(holder, reference.0.clone())], 1).await {
            Ok(page) => {
                if let Some(found) = items(&page).first() {
                    return id_of(found, &ACCOUNT);
                }
            }
            Err(failure) if failure.exit_status == ExitStatus::Forbidden => return Ok(id),
            Err(failure) => return Err(failure),
        }
    }
    Ok(id)
}

/// Resolves an allocation. Live ones are searched first, so that the ids of released ones do not make a prefix ambiguous.
pub(crate) async fn allocation(reference: &Ref, api: &Api) -> Result<Uuid, Failure> {
    if let Ok(id) = reference.0.parse() {
        return Ok(id);
    }
    let live = live_allocations(&Vec::new(), MAX_SEARCHED, api).await?;
    match reference.resolve_among(&ALLOCATION, items(&live)) {
        Err(failure) if failure.exit_status == ExitStatus::NotFound => reference.id(&ALLOCATION, api).await,
        found => found,
    }
}

/// The state of a removed node.
const REMOVED: &str = "removed";
/// The states of a live allocation.
const LIVE: [&str; 5] = ["requested", "provisioning", "active", "releasing", "release_failed"];

/// Live allocations, up to `limit` of each state, since the API filters by one state.
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

/// Up to `limit` nodes that are not removed. The API filters by one state, so the pages are read until there are enough.
pub(crate) async fn present_nodes(query: &Query<'_>, limit: usize, api: &Api) -> Result<Value, Failure> {
    api.list_filtered(NODE.path, query, limit, |node| node["state"] != REMOVED).await
}

#[cfg(test)]
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
        text.parse::<Ref>().unwrap().resolve_among(&NODE, &nodes()).map(|id| id.to_string())
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
        assert_eq!(failure.exit_status, ExitStatus::Usage);
        for part in ["fits 2 nodes", "00000000000a (gpu-1.example active)", "00000000000b (gpu-2.example offline)"] {
            assert!(failure.message.contains(part), "{failure}");
        }
    }

    #[test]
    fn name_that_is_a_prefix_of_another_id_is_ambiguous() {
        let failure = found("0198").unwrap_err();
        assert_eq!(failure.exit_status, ExitStatus::Usage);
        assert!(failure.message.contains("fits 3 nodes"), "{failure}");
    }

    #[test]
    fn removed_node_does_not_keep_its_name_from_a_new_one() {
        let named = |id: &str, state: &str| json!({ "id": id, "name": "mine", "state": state });
        let ids = ["0198f000-0000-7000-8000-00000000000a", "0198f000-0000-7000-8000-00000000000b"];
        let found = |states: [&str; 2]| {
            "mine".parse::<Ref>().unwrap().resolve_among(&NODE, &[named(ids[0], states[0]), named(ids[1], states[1])])
        };
        assert_eq!(found(["removed", "registered"]).unwrap().to_string(), ids[1]);
        for states in [["active", "registered"], ["removed", "removed"]] {
            assert_eq!(found(states).unwrap_err().exit_status, ExitStatus::Usage, "{states:?} is ambiguous");
        }
    }

    #[test]
    fn unique_name_resolves_and_a_shared_one_is_ambiguous() {
        let named = |id: &str, name: &str| json!({ "id": id, "name": name, "sku": "h100", "state": "active" });
        let ids = ["0198f000-0000-7000-8000-00000000000a", "0198f000-0000-7000-8000-00000000000b"];
        let found = |text: &str, second: &str| {
            text.parse::<Ref>().unwrap().resolve_among(&ALLOCATION, &[named(ids[0], "train"), named(ids[1], second)])
        };
        assert_eq!(found("train", "serve").unwrap().to_string(), ids[0]);
        assert_eq!(found("train", "train").unwrap_err().exit_status, ExitStatus::Usage);
        assert_eq!(found(ids[1], "train").unwrap().to_string(), ids[1]);
    }

    #[test]
    fn unknown_or_too_short_prefix_is_not_found() {
        for text in ["0299a", "02", "gpu-9.example"] {
            let failure = found(text).unwrap_err();
            assert_eq!(failure.exit_status, ExitStatus::NotFound, "{text}");
            assert!(failure.next.unwrap().contains("gpuctl nodes list"));
        }
        for bad in ["", " ", "a\nb"] {
            assert!(bad.parse::<Ref>().is_err(), "{bad:?}");
        }
    }
}
