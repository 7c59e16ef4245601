//! The table of what goes into a bundle.

use super::anonymity::Pseudonyms;
use super::redaction::SecretScrubber;
use super::{SupportBundleArgs, bus, database, machine, redaction, service_api};
use crate::config::installed_settings::InstalledSettings;
use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;

/// The content, or why there is none.
pub(super) type Collecting = BoxFuture<'static, Result<Vec<u8>, String>>;

/// One file of a bundle.
pub(super) struct BundleItem {
    /// Its path in the archive.
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    pub(super) limit: Duration,
    pub(super) collect: Collecting,
}

/// What became of an item.
#[derive(Clone, Debug)]
pub(super) struct Collected {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    pub(super) content: Result<Vec<u8>, String>,
    /// What was done to the content.
    pub(super) notes: Vec<String>,
}

impl Collected {
    pub(super) fn new(name: &'static str, what: &'static str, content: Result<Vec<u8>, String>) -> Self {
        Self { name, what, content, notes: Vec::new() }
    }

    /// Without the secrets of the settings, whatever the content or the reason comes from.
    pub(super) fn scrubbed(mut self, scrubber: &SecretScrubber) -> Self {
        let (content, count) = self.map_text(|text| scrubber.scrub(text));
        self.content = content;
        if count > 0 {
            self.notes.push(format!("{count} secrets were taken out"));
        }
        self
    }

    pub(super) fn anonymous(mut self, pseudonyms: &mut Pseudonyms) -> Self {
        self.content = match &self.content {
            Ok(content) => pseudonyms.replace(&String::from_utf8_lossy(content)).map(String::into_bytes),
            Err(why) => Err(pseudonyms.replace(why).unwrap_or_else(|error| error)),
        };
        self
    }

    fn map_text(&self, mut map: impl FnMut(&str) -> (String, usize)) -> (Result<Vec<u8>, String>, usize) {
        match &self.content {
            Ok(content) => {
                let (text, count) = map(&String::from_utf8_lossy(content));
                (Ok(text.into_bytes()), count)
            }
            Err(why) => {
                let (why, count) = map(why);
                (Err(why), count)
            }
        }
    }
}

const LOCAL: Duration = Duration::from_secs(10);
const REMOTE: Duration = Duration::from_secs(20);
/// The longest of its own checks, and some more.
const DOCTOR: Duration = Duration::from_secs(30);

pub(super) fn table(settings: &Arc<InstalledSettings>, args: &SupportBundleArgs) -> Vec<BundleItem> {
    if args.database_only {
        return database::table(settings, true);
    }
    let item = |name, what, limit, collect| BundleItem { name, what, limit, collect };
    let mut items = vec![
        item("doctor.json", "the findings of gpuaas doctor", DOCTOR, doctor(settings)),
        item("settings.json", "the settings, without their secrets", LOCAL, redaction::settings(settings)),
        item("machine.json", "versions, kernel, memory, load", LOCAL, machine::facts()),
        item("log.jsonl", "the end of the service's log", REMOTE, machine::log(args)),
        item("streams.json", "the streams of NATS", REMOTE, bus::streams(settings)),
    ];
    items.extend(service_api::table(settings, args));
    items.extend(database::table(settings, args.anonymous));
    items
}

fn doctor(settings: &Arc<InstalledSettings>) -> Collecting {
    let settings = InstalledSettings::clone(settings);
    Box::pin(async move {
        let report = crate::doctor::diagnose(settings, None).await.map_err(|error| error.to_string())?;
        Ok(pretty(&report.as_json()))
    })
}

pub(super) fn pretty(value: &serde_json::Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
