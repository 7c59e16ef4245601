//! Pseudonyms: the same name, address or id is always replaced by the same text, so that a reader can follow it through the files without
//! knowing whose it is.

use super::items::Collected;
use crate::config::installed_settings::InstalledSettings;
use regex::{Captures, Regex};
use reqwest::Url;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::LazyLock;

/// Names of more entities than this are those of a machine's dump, not of a cluster.
const MOST_NAMES: usize = 100_000;
const SHORTEST_NAME: usize = 3;

/// Words that identify no one.
const COMMON: [&str; 12] =
    ["all", "null", "none", "user", "admin", "system", "node", "gpuaas", "localhost", "public", "true", "false"];

/// The item whose values are names, and nothing else.
pub(super) const NAMES: &str = "database/names.json";

static ID: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b").ok()
});
static EMAIL: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"[\p{L}0-9._%+-]+@[\p{L}0-9-]+(?:\.[\p{L}0-9-]+)+").ok());
static ADDRESS: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b|[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}").ok()
});
/// Values of these fields are names, in JSON and in JSON within a text.
static FIELD: LazyLock<Option<Regex>> = LazyLock::new(|| {
    let names = "user_id|org_id|project_id|tenant|tenant_id|subject|owner|email|host|host_name|hostname|node_name|member_name|client|display_name";
    Regex::new(&format!(r#""(?:{names})"\s*:\s*"((?:[^"\\]|\\.)+)""#)).ok()
});
/// Actors of the history.
static ACTOR: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r#""(?:user|service_account|sa):([^"\\]+)""#).ok());

/// The replacements so far.
#[derive(Debug, Default)]
pub(super) struct Pseudonyms {
    names: BTreeSet<String>,
    /// The names as one pattern, made at the first replacement.
    pattern: Option<Regex>,
    /// By kind and original.
    given: BTreeMap<(&'static str, String), usize>,
}

impl Pseudonyms {
    /// With the names that are in the settings.
    pub(super) fn of(settings: &InstalledSettings) -> Self {
        let mut pseudonyms = Self::default();
        for (name, value) in settings.set() {
            let urls = value.split(',').filter_map(|url| Url::parse(url.trim()).ok());
            let hosts: Vec<_> =
                urls.filter_map(|url| Some((url.host_str()?.to_owned(), url.username().to_owned()))).collect();
            hosts.into_iter().for_each(|(host, user)| {
                pseudonyms.add(&host);
                pseudonyms.add(&user);
            });
            if matches!(
                name,
                "SVC_MEMBER_NAME" | "SVC_HOST_NAME" | "SVC_LAB_STACK" | "SVC_TRUST_DOMAIN" | "SVC_NODE_ID"
            ) {
                pseudonyms.add(value);
            }
            if name == "SVC_SMTP_FROM" {
                pseudonyms.add(value.split('<').next().unwrap_or_default().trim());
            }
        }
        if let Some(host) = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()) {
            pseudonyms.add(&host);
        }
        pseudonyms
    }

    fn add(&mut self, name: &str) {
        let is_one = name.chars().count() >= SHORTEST_NAME
            && name.chars().any(char::is_alphabetic)
            && !COMMON.contains(&name.to_lowercase().as_str());
        if is_one && self.names.len() < MOST_NAMES {
            self.names.insert(name.to_owned());
            self.pattern = None;
        }
    }

    /// Takes over the names that an item has.
    pub(super) fn learn(&mut self, item: &Collected) {
        let Ok(content) = &item.content else { return };
        let text = String::from_utf8_lossy(content);
        let found: Vec<String> = [&FIELD, &ACTOR]
            .into_iter()
            .filter_map(|form| form.as_ref())
            .flat_map(|form| form.captures_iter(&text).filter_map(|found| Some(found.get(1)?.as_str().to_owned())))
            .collect();
        found.iter().for_each(|name| self.add(name));
        if item.name == NAMES {
            let names: Vec<String> = serde_json::from_str(&text).unwrap_or_default();
            names.iter().for_each(|name| self.add(name));
        }
    }

    /// The text with pseudonyms.
    pub(super) fn replace(&mut self, text: &str) -> String {
        let mut text = text.to_owned();
        for (kind, form) in [("id", &ID), ("email", &EMAIL)] {
            text = self.replace_form(kind, form.as_ref(), &text, |_| true);
        }
        let pattern = self.pattern.clone().or_else(|| self.compile());
        text = self.replace_form("name", pattern.as_ref(), &text, |_| true);
        self.replace_form("address", ADDRESS.as_ref(), &text, |address| {
            address.parse::<IpAddr>().is_ok_and(|address| !address.is_loopback() && !address.is_unspecified())
        })
    }

    /// One pattern of all names, the longest first.
    fn compile(&mut self) -> Option<Regex> {
        let mut names: Vec<_> = self.names.iter().collect();
        if names.is_empty() {
            return None;
        }
        names.sort_by_key(|name| std::cmp::Reverse(name.len()));
        let names: Vec<_> = names.into_iter().map(|name| bounded(name)).collect();
        self.pattern = regex::RegexBuilder::new(&names.join("|")).size_limit(64 << 20).build().ok();
        self.pattern.clone()
    }

    fn replace_form(
        &mut self,
        kind: &'static str,
        form: Option<&Regex>,
        text: &str,
        is_one: fn(&str) -> bool,
    ) -> String {
        let Some(form) = form else { return text.to_owned() };
        let replaced = form.replace_all(text, |found: &Captures<'_>| {
            let original = &found[0];
            if is_one(original) { self.pseudonym(kind, original) } else { original.to_owned() }
        });
        replaced.into_owned()
    }

    fn pseudonym(&mut self, kind: &'static str, original: &str) -> String {
        let next = self.given.keys().filter(|(of, _)| *of == kind).count() + 1;
        let number = *self.given.entry((kind, original.to_lowercase())).or_insert(next);
        format!("{kind}-{number}")
    }
}

/// The name as a whole: not within a longer word.
fn bounded(name: &str) -> String {
    let is_word = |letter: Option<char>| letter.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
    let begin = if is_word(name.chars().next()) { r"\b" } else { "" };
    let end = if is_word(name.chars().next_back()) { r"\b" } else { "" };
    format!("{begin}{}{end}", regex::escape(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_original_has_the_same_pseudonym_in_every_file() {
        let mut pseudonyms = Pseudonyms::default();
        let history = r#"[{"actor": "user:auth0|ann", "entity": "0194b0a2-7f8e-7c11-8a52-b4c1d2e3f405", "why": "for auth0|ann"}]"#;
        let log = r#"{"user_id":"auth0|ann","message":"ann@example.com at 10.1.2.3 and 2001:db8::7, replica-1.example, 127.0.0.1","version":"0.1.0"}"#;
        let names = r#"["replica-1.example", "x", "user"]"#;
        let item = |name, text: &str| Collected::new(name, "a test", Ok(text.as_bytes().to_vec()));
        for it in [item("history.json", history), item("log.jsonl", log), item(NAMES, names)] {
            pseudonyms.learn(&it);
        }
        let (history, log) = (pseudonyms.replace(history), pseudonyms.replace(log));
        assert_eq!(history, r#"[{"actor": "user:name-1", "entity": "id-1", "why": "for name-1"}]"#);
        let expected = r#"{"user_id":"name-1","message":"email-1 at address-1 and address-2, name-2, 127.0.0.1","version":"0.1.0"}"#;
        assert_eq!(log, expected);
        assert_eq!(pseudonyms.replace("10.1.2.3 ANN@example.com 12:34:56"), "address-1 email-1 12:34:56");
    }

    #[test]
    fn name_is_replaced_as_a_whole_word_alone() {
        let mut pseudonyms = Pseudonyms::default();
        pseudonyms.add("lab");
        pseudonyms.add("user");
        pseudonyms.add("42");
        assert_eq!(pseudonyms.replace("lab label lab-2 user 42"), "name-1 label name-1-2 user 42");
    }
}
