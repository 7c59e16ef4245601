//! Pseudonyms: the same name, address or id is always replaced by the same text, so that a reader can follow it through the files without
//! knowing whose it is.

use super::items::Collected;
use super::server_url::ServerUrl;
use crate::config::installed_settings::InstalledSettings;
use regex::{Captures, Regex};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::LazyLock;

/// Names of more entities than this are those of a machine's dump, not of a cluster.
const MOST_NAMES: usize = 100_000;
const SHORTEST_NAME: usize = 3;
/// The names of one pattern: one of all names would exceed the bound on its size.
const NAMES_OF_A_PATTERN: usize = 4000;

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
    /// There are more names than are replaced.
    is_full: bool,
    /// The names as patterns, made at the first replacement.
    patterns: Option<Vec<Regex>>,
    /// By kind and original.
    given: BTreeMap<(&'static str, String), usize>,
    /// The last number of each kind.
    last: BTreeMap<&'static str, usize>,
}

impl Pseudonyms {
    /// With the names that are in the settings.
    pub(super) fn of(settings: &InstalledSettings) -> Self {
        let mut pseudonyms = Self::default();
        for (name, value) in settings.set() {
            if value.contains("://") {
                let url = ServerUrl::read_list(value);
                url.hosts.iter().chain(&url.users).for_each(|name| pseudonyms.add(name));
            }
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
        if !is_one || self.names.contains(name) {
            return;
        }
        if self.names.len() < MOST_NAMES {
            self.names.insert(name.to_owned());
            self.patterns = None;
        } else {
            self.is_full = true;
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
    ///
    /// # Errors
    /// Where not every name can be replaced: then the text is not shown.
    pub(super) fn replace(&mut self, text: &str) -> Result<String, String> {
        if self.is_full {
            return Err(format!("it may have names: there are more than {MOST_NAMES}, which are not all replaced"));
        }
        let mut text = text.to_owned();
        for (kind, form) in [("id", &ID), ("email", &EMAIL)] {
            text = self.replace_form(kind, form.as_ref(), &text, |_| true);
        }
        let patterns = match self.patterns.take() {
            Some(patterns) => patterns,
            None => self.compile().map_err(|error| format!("its names cannot be replaced: {error}"))?,
        };
        for pattern in &patterns {
            text = self.replace_form("name", Some(pattern), &text, |_| true);
        }
        self.patterns = Some(patterns);
        Ok(self.replace_form("address", ADDRESS.as_ref(), &text, |address| {
            address.parse::<IpAddr>().is_ok_and(|address| !address.is_loopback() && !address.is_unspecified())
        }))
    }

    /// Patterns of all names, the longest first.
    fn compile(&self) -> Result<Vec<Regex>, regex::Error> {
        let mut names: Vec<_> = self.names.iter().collect();
        names.sort_by_key(|name| std::cmp::Reverse(name.len()));
        let pattern = |names: &[&String]| {
            let names: Vec<_> = names.iter().map(|name| bounded(name)).collect();
            regex::RegexBuilder::new(&names.join("|")).size_limit(64 << 20).build()
        };
        names.chunks(NAMES_OF_A_PATTERN).map(pattern).collect()
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
        let last = self.last.entry(kind).or_default();
        let number = *self.given.entry((kind, original.to_lowercase())).or_insert_with(|| {
            *last += 1;
            *last
        });
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
        let (history, log) = (pseudonyms.replace(history).unwrap(), pseudonyms.replace(log).unwrap());
        assert_eq!(history, r#"[{"actor": "user:name-1", "entity": "id-1", "why": "for name-1"}]"#);
        let expected = r#"{"user_id":"name-1","message":"email-1 at address-1 and address-2, name-2, 127.0.0.1","version":"0.1.0"}"#;
        assert_eq!(log, expected);
        assert_eq!(pseudonyms.replace("10.1.2.3 ANN@example.com 12:34:56").unwrap(), "address-1 email-1 12:34:56");
    }

    #[test]
    fn name_is_replaced_as_a_whole_word_alone() {
        let mut pseudonyms = Pseudonyms::default();
        pseudonyms.add("lab");
        pseudonyms.add("user");
        pseudonyms.add("42");
        assert_eq!(pseudonyms.replace("lab label lab-2 user 42").unwrap(), "name-1 label name-1-2 user 42");
    }

    #[test]
    fn every_name_of_a_large_installation_is_replaced_and_more_than_that_are_withheld() {
        let mut pseudonyms = Pseudonyms::default();
        let name = |number: usize| format!("gpu-node-of-a-large-installation-in-rack-{number}.example");
        (0..MOST_NAMES).for_each(|number| pseudonyms.add(&name(number)));
        let text = format!("{} and {}", name(0), name(MOST_NAMES - 1));
        let replaced = pseudonyms.replace(&text).unwrap();
        assert!(replaced.starts_with("name-") && !replaced.contains("rack"), "{replaced}");
        pseudonyms.add(&name(0));
        assert!(pseudonyms.replace(&text).is_ok(), "a name that is known");
        pseudonyms.add(&name(MOST_NAMES));
        assert!(pseudonyms.replace(&text).unwrap_err().contains("100000"));
    }

    #[test]
    fn hosts_of_every_server_of_a_setting_are_names() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gpuaas.env");
        let settings = "SVC_DATABASE_URL=postgres://ann:x@db-one:5432,db-two:5432,db-three/gpuaas\nSVC_NATS_URL=tls://r:x@bus-one,bus-two:4222\n";
        std::fs::write(&file, settings).unwrap();
        let mut pseudonyms = Pseudonyms::of(&InstalledSettings::open(Some(&file)));
        let replaced = pseudonyms.replace("db-one db-two db-three bus-one bus-two ann").unwrap();
        assert_eq!(replaced, "name-1 name-2 name-3 name-4 name-5 name-6");
    }
}
