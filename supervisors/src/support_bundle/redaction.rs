//! No secret of the settings is in a bundle: values of secret settings are not written, and wherever else their text occurs, it is taken
//! out.

use super::items::{Collecting, pretty};
use super::server_url::ServerUrl;
use crate::config::installed_settings::InstalledSettings;
use crate::config::settings_table;
use domain::redact::REDACTED;
use percent_encoding::percent_decode_str;
use regex::Regex;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

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
/// The longest wait for one.
const READ_WITHIN: Duration = Duration::from_secs(3);

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
        return ServerUrl::read_list(value).shown.unwrap_or_else(|| REDACTED.to_owned());
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
    /// Secrets of digits alone, as whole words: within a longer number they are not the secret.
    numbers: Vec<Regex>,
}

impl SecretScrubber {
    /// And why files with secrets could not be read: their text is not found then.
    pub(super) async fn of(settings: &InstalledSettings, token_file: Option<&Path>) -> (Self, Vec<String>) {
        let mut secrets = BTreeSet::new();
        for (name, value) in settings.set() {
            let has_row = settings_table::names().any(|known| known == name);
            if URLS.contains(&name) {
                secrets.extend(ServerUrl::read_list(value).passwords);
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
        let files: Vec<PathBuf> = files.chain(token_file.map(Path::to_owned)).collect();
        let mut unread = Vec::new();
        for read in futures::future::join_all(files.into_iter().map(read_secret)).await {
            let text = match read {
                Ok(text) => text,
                Err(why) => {
                    unread.push(why);
                    continue;
                }
            };
            let lines = text.lines().map(str::trim).filter(|line| !line.starts_with(['#', '-']));
            for line in lines {
                secrets.extend(line.split([' ', ':']).filter(|word| word.len() >= 12).map(str::to_owned));
                secrets.insert(line.to_owned());
            }
        }
        (Self::of_secrets(secrets), unread)
    }

    fn of_secrets(secrets: BTreeSet<String>) -> Self {
        let is_long = |secret: &String| secret.chars().count() >= SHORTEST;
        let is_number = |secret: &String| secret.bytes().all(|byte| byte.is_ascii_digit());
        let (numbers, mut secrets): (Vec<_>, Vec<_>) = secrets.into_iter().filter(is_long).partition(is_number);
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        let numbers = numbers.iter().filter_map(|number| Regex::new(&format!(r"\b{number}\b")).ok()).collect();
        Self { secrets, numbers }
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
        for form in self.numbers.iter().chain(FORMS.iter()) {
            let found = form.find_iter(&text).count();
            if found > 0 {
                count += found;
                text = form.replace_all(&text, REDACTED).into_owned();
            }
        }
        (text, count)
    }
}

/// The text of a file with secrets, which may be on a file system that does not answer.
async fn read_secret(path: PathBuf) -> Result<String, String> {
    let file = path.clone();
    let reading = tokio::task::spawn_blocking(move || {
        let mut bytes = Vec::new();
        std::fs::File::open(file)?.take(MOST_BYTES as u64 + 1).read_to_end(&mut bytes).map(|_| bytes)
    });
    let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
    match tokio::time::timeout(READ_WITHIN, reading).await {
        Ok(Ok(Ok(bytes))) if bytes.len() > MOST_BYTES => Err(failed(&"it is too large for a file with a secret")),
        Ok(Ok(Ok(bytes))) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Ok(Ok(Err(error))) => Err(failed(&error)),
        Ok(Err(error)) => Err(failed(&error)),
        Err(_) => Err(failed(&"its file system does not answer")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn file_with_a_secret_that_hangs_is_named_and_keeps_nothing_from_being_made() {
        let folder = tempfile::tempdir().unwrap();
        // A pipe without a writer does not answer, as a dead network file system.
        let (pipe, file, large) = (folder.path().join("kek"), folder.path().join("env"), folder.path().join("token"));
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRUSR).unwrap();
        std::fs::write(
            &file,
            format!("SVC_KEK_FILE={}\nSVC_DATABASE_URL=postgres://ann:hunter22@db/x\n", pipe.display()),
        )
        .unwrap();
        std::fs::write(&large, "x".repeat(MOST_BYTES + 1)).unwrap();
        let settings = InstalledSettings::open(Some(&file));
        let (scrubber, unread) = SecretScrubber::of(&settings, Some(&large)).await;
        assert!(
            unread.len() == 2 && unread[0].ends_with("does not answer") && unread[1].ends_with("a secret"),
            "{unread:?}"
        );
        assert_eq!(scrubber.scrub("hunter22").1, 1, "the others are found");
        // It ends with the writer.
        drop(std::fs::OpenOptions::new().write(true).open(&pipe).unwrap());
    }

    #[test]
    fn value_that_is_or_may_be_a_secret_is_withheld() {
        for (name, value) in SECRETS.iter().map(|name| (*name, "hunter2")).chain([
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=hunter2"),
            ("SVC_DATABASE_URL", "postgres://gpuaas:hunter2@db.example/gpuaas?password=hunter2"),
            ("SVC_DATABASE_URL", "postgres://gpuaas:hunter2@db-1:5432,db-2:5432/gpuaas"),
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
        let scrubber_of = |url: &str| SecretScrubber::of_secrets(ServerUrl::read_list(url).passwords);
        let scrubber = scrubber_of("postgres://u:a%40bcd@db/x?password=other-one");
        let (text, count) = scrubber.scrub("tried a@bcd, then a%40bcd, then other-one");
        assert_eq!((text.matches(REDACTED).count(), count), (3, 3), "{text}");
        let (text, count) =
            scrubber_of("postgres://u:81726354@db-1,db-2/x").scrub("of u:81726354, at 1817263540, 81726354");
        assert_eq!((text.as_str(), count), ("of u:[redacted], at 1817263540, [redacted]", 2));
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
