//! No secret of the settings is in a bundle: values of secret settings are not written, and wherever else their text occurs, it is taken
//! out.

use super::items::{Collecting, pretty};
use crate::config::installed_settings::InstalledSettings;
use crate::config::settings_table;
use domain::redact::REDACTED;
use percent_encoding::percent_decode_str;
use regex::Regex;
use reqwest::Url;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, LazyLock};

/// Settings whose value is a secret.
const SECRETS: [&str; 10] = [
    "INTERNAL_JWKS_REFRESH_TOKEN",
    "INTERNAL_STATS_TOKEN",
    "SVC_OIDC_CONSOLE_CLIENT_SECRET",
    "SVC_PAYMENTS_SECRET_KEY",
    "SVC_PAYMENTS_WEBHOOK_SECRETS",
    "MAAS_API_TOKEN",
    "SVC_ALERTMANAGER_PASSWORD",
    "SVC_ALERTMANAGER_TOKEN",
    "SVC_LOG_STORE_PASSWORD",
    "SVC_LOG_STORE_TOKEN",
];

/// Settings that are URLs with credentials.
const URLS: [&str; 3] = ["SVC_DATABASE_URL", "SVC_NATS_URL", "SVC_SMTP_URL"];

/// Shorter ones would be found in ordinary text. No key or token is shorter; a password of a user may be.
const SHORTEST: usize = 4;
/// Of a file with secrets.
const MOST_BYTES: usize = 64 * 1024;

/// What secrets of other origin look like: keys in PEM, tokens of HTTP, of users and of nodes, passwords in URLs.
static FORMS: LazyLock<Vec<Regex>> = LazyLock::new(|| {
    [
        r#"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----|[^"\n]*)"#,
        r"(?i)\b(?:bearer|basic) +[a-z0-9._~+/=-]{8,}",
        r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]*",
        r"\bgpu(?:enr|sak)_[A-Za-z0-9_-]{8,}",
        r"\b(?:sk|rk|whsec)_[A-Za-z0-9_+/=-]{8,}",
        r"\b[a-z][a-z0-9+.-]*://[^\s/:@]*:[^\s/@]+@",
    ]
    .into_iter()
    .filter_map(|form| Regex::new(form).ok())
    .collect()
});

/// The settings, for people. A value of which it is not known whether it is a secret is withheld.
pub(super) fn settings(settings: &Arc<InstalledSettings>) -> Collecting {
    let settings = Arc::clone(settings);
    Box::pin(async move {
        let shown: Map<String, Value> =
            settings.set().map(|(name, value)| (name.to_owned(), Value::String(shown(name, value)))).collect();
        Ok(pretty(&json!({
            "file": settings.file,
            "settings": shown,
            "unknown": settings.unknown_names(),
        })))
    })
}

fn shown(name: &str, value: &str) -> String {
    if URLS.contains(&name) {
        return Url::parse(value).map_or_else(
            |_| REDACTED.to_owned(),
            |mut url| {
                let _ = url.set_password(None);
                let _ = url.set_username("");
                // Postgres takes its password as a parameter, too.
                let parameters: Vec<_> = url.query_pairs().map(|(name, _)| name.into_owned()).collect();
                url.set_query(None);
                format!("{url} {parameters:?}")
            },
        );
    }
    // Collectors' variables have no rows, and `_HEADERS` has their token.
    let has_row = settings_table::names().any(|known| known == name);
    if SECRETS.contains(&name) || !has_row { REDACTED.to_owned() } else { value.to_owned() }
}

/// Finds the secrets of an installation in any text.
#[derive(Debug, Default)]
pub(super) struct SecretScrubber {
    /// The longest first: one may be a part of another.
    secrets: Vec<String>,
}

impl SecretScrubber {
    pub(super) fn of(settings: &InstalledSettings, token_file: Option<&Path>) -> Self {
        let mut secrets = BTreeSet::new();
        for (name, value) in settings.set() {
            let has_row = settings_table::names().any(|known| known == name);
            if URLS.contains(&name) {
                secrets.extend(url_secrets(value));
            } else if SECRETS.contains(&name) {
                secrets.insert(value.to_owned());
                secrets.extend(value.split([',', ':']).map(|part| part.trim().to_owned()));
            } else if !has_row && name.ends_with("_HEADERS") {
                for header in value.split(',') {
                    // `authorization=Bearer%20…`: the token alone is a secret, too.
                    let value = header.split_once('=').map_or(header, |(_, value)| value);
                    let value = percent_decode_str(value.trim()).decode_utf8_lossy().into_owned();
                    secrets.extend(value.split_whitespace().last().map(str::to_owned));
                    secrets.insert(value);
                }
                secrets.insert(value.to_owned());
            }
        }
        let files = settings_table::SECRET_FILES.iter().filter_map(|name| settings.get(name)).map(Into::into);
        for file in files.chain(token_file.map(Path::to_owned)) {
            let text = std::fs::read_to_string::<std::path::PathBuf>(file).unwrap_or_default();
            if text.len() > MOST_BYTES {
                continue;
            }
            let lines = text.lines().map(str::trim).filter(|line| !line.starts_with(['#', '-']));
            for line in lines {
                secrets.extend(line.split([' ', ':']).filter(|word| word.len() >= 12).map(str::to_owned));
                secrets.insert(line.to_owned());
            }
        }
        let is_long = |secret: &String| secret.chars().count() >= SHORTEST && secret.parse::<u64>().is_err();
        let mut secrets: Vec<_> = secrets.into_iter().filter(is_long).collect();
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Self { secrets }
    }

    /// The text without secrets, and how many were in it.
    pub(super) fn scrub(&self, text: &str) -> (String, usize) {
        let (mut text, mut count) = (text.to_owned(), 0);
        for secret in &self.secrets {
            let found = text.matches(secret.as_str()).count();
            if found > 0 {
                count += found;
                text = text.replace(secret.as_str(), REDACTED);
            }
        }
        for form in FORMS.iter() {
            let found = form.find_iter(&text).count();
            if found > 0 {
                count += found;
                text = form.replace_all(&text, REDACTED).into_owned();
            }
        }
        (text, count)
    }
}

/// The password as it is written, and decoded, and the values of parameters that may be one.
fn url_secrets(url: &str) -> Vec<String> {
    let Ok(parsed) = Url::parse(url) else { return vec![url.to_owned()] };
    let mut secrets = Vec::new();
    if let Some(password) = parsed.password() {
        secrets.push(password.to_owned());
        secrets.push(percent_decode_str(password).decode_utf8_lossy().into_owned());
    }
    secrets.extend(parsed.query_pairs().filter(|(name, _)| name == "password").map(|(_, value)| value.into_owned()));
    secrets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_that_is_or_may_be_a_secret_is_withheld() {
        for (name, value) in SECRETS.iter().map(|name| (*name, "hunter2")).chain([
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=hunter2"),
            ("SVC_DATABASE_URL", "postgres://gpuaas:hunter2@db.example/gpuaas?password=hunter2"),
            ("SVC_NATS_URL", "no url with hunter2"),
        ]) {
            let shown = shown(name, value);
            assert!(!shown.contains("hunter2"), "{name}: {shown}");
        }
        assert_eq!(shown("SVC_NATS_URL", "tls://replica-1:hunter2@nats.example:4222"), "tls://nats.example:4222 []");
        assert_eq!(shown("SVC_ROLES", "all"), "all");
    }

    /// A setting that is added has to be in one of the lists, if its name says that it is a secret.
    #[test]
    fn every_setting_whose_name_says_secret_is_in_a_list() {
        let says_secret = |name: &&str| {
            ["TOKEN", "SECRET", "PASSWORD", "KEK", "ACCOUNT", "PRIVATE"].iter().any(|it| name.contains(it))
        };
        let listed =
            |name: &&str| SECRETS.contains(name) || settings_table::SECRET_FILES.contains(name) || URLS.contains(name);
        let missing: Vec<_> = settings_table::names().filter(says_secret).filter(|name| !listed(name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn secrets_are_taken_out_of_any_text() {
        let scrubber = SecretScrubber { secrets: url_secrets("postgres://u:a%40bcd@db/x?password=other-one") };
        let (text, count) = scrubber.scrub("tried a@bcd, then a%40bcd, then other-one");
        assert_eq!((text.matches(REDACTED).count(), count), (3, 3), "{text}");
        for secret in [
            "Authorization: Bearer abcdefghij",
            "gpuenr_AAAAAAAAAAAA",
            "sk_live_AAAAAAAAAAAA",
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
            "-----BEGIN EC PRIVATE KEY-----\nAAAA\n-----END EC PRIVATE KEY-----",
            "postgres://u:hunter22@db",
        ] {
            let (text, count) = SecretScrubber::default().scrub(&format!("before {secret} after"));
            assert!(count == 1 && text.contains("before") && text.contains("after"), "{secret}: {text}");
        }
        let plain = "2027-01-15 https://gpu.example:8443/api at 10.0.0.1:9443, basic health";
        assert_eq!(SecretScrubber::default().scrub(plain), (plain.to_owned(), 0));
    }
}
