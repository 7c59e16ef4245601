//! Log lines about certificates of the service that end, beside the alerts on `certificate_end_timestamp_seconds`.

use chrono::{DateTime, TimeDelta, Utc};
use std::collections::BTreeMap;

/// As the alert `GPUAASCertificateEndsSoon` counts.
pub const ENDS_SOON: TimeDelta = TimeDelta::days(14);
/// As the alert `GPUAASCertificateEnds` counts.
const ENDS: TimeDelta = TimeDelta::days(2);

/// While nothing changes, it is logged once more after this time.
const REPEATED_AFTER: TimeDelta = TimeDelta::days(1);

/// How far the end of a certificate is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expiry {
    Far,
    /// Within two weeks.
    Soon,
    /// Within two days.
    Close,
    Ended,
}

impl Expiry {
    fn of(end: DateTime<Utc>, now: DateTime<Utc>) -> Self {
        match end - now {
            left if left <= TimeDelta::zero() => Self::Ended,
            left if left < ENDS => Self::Close,
            left if left < ENDS_SOON => Self::Soon,
            _ => Self::Far,
        }
    }
}

/// What was logged last, by certificate.
#[derive(Debug, Default)]
pub struct CertificateLog {
    logged: BTreeMap<&'static str, (Expiry, DateTime<Utc>)>,
}

impl CertificateLog {
    /// Logs each certificate that ends: when it comes closer to its end, and once a day.
    pub fn record(&mut self, ends: impl IntoIterator<Item = (&'static str, DateTime<Utc>)>, now: DateTime<Utc>) {
        for (certificate, end) in ends {
            let runbook = "ops.certificates";
            match self.due(certificate, end, now) {
                None | Some(Expiry::Far) => {}
                Some(Expiry::Soon) => {
                    tracing::warn!(certificate, %end, runbook, "a certificate ends within two weeks: {}", action(certificate));
                }
                Some(Expiry::Close) => {
                    tracing::error!(certificate, %end, runbook, "a certificate ends within two days: {}", action(certificate));
                }
                Some(Expiry::Ended) => {
                    tracing::error!(certificate, %end, runbook, "a certificate has ended, and clients refuse it: {}", action(certificate));
                }
            }
        }
    }

    /// How far the end is, where that has to be logged.
    fn due(&mut self, certificate: &'static str, end: DateTime<Utc>, now: DateTime<Utc>) -> Option<Expiry> {
        let expiry = Expiry::of(end, now);
        let is_logged =
            self.logged.get(certificate).is_some_and(|(last, at)| *last == expiry && now - *at < REPEATED_AFTER);
        if is_logged {
            return None;
        }
        self.logged.insert(certificate, (expiry, now));
        Some(expiry)
    }
}

fn action(certificate: &str) -> &'static str {
    match certificate {
        "server" => "put the renewed chain and its key in place, and run `systemctl reload gpuaas`",
        _ => "rotate the authority of the nodes, `gpuctl keys stage node-ca`",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_is_logged_when_it_comes_closer_to_its_end_and_once_a_day() {
        let mut log = CertificateLog::default();
        let end = DateTime::from_timestamp(1_800_000_000, 0).unwrap();
        let mut at = |before: TimeDelta, end| log.due("server", end, end - before);
        assert_eq!(at(TimeDelta::days(15), end), Some(Expiry::Far));
        assert_eq!(at(TimeDelta::days(14), end), Some(Expiry::Far), "a day has passed");
        let just_within = TimeDelta::days(14) - TimeDelta::seconds(1);
        assert_eq!(at(just_within, end), Some(Expiry::Soon));
        assert_eq!(at(just_within - TimeDelta::hours(23), end), None);
        assert_eq!(at(just_within - TimeDelta::hours(24), end), Some(Expiry::Soon));
        assert_eq!(at(TimeDelta::hours(47), end), Some(Expiry::Close));
        assert_eq!(at(TimeDelta::seconds(1), end), Some(Expiry::Close), "a day has passed");
        assert_eq!(at(TimeDelta::zero(), end), Some(Expiry::Ended));
        assert_eq!(at(TimeDelta::hours(-1), end), None);
        assert_eq!(log.due("server", end + TimeDelta::days(90), end), Some(Expiry::Far), "it is renewed");
    }

    #[test]
    fn certificates_are_logged_by_themselves() {
        let mut log = CertificateLog::default();
        let now = DateTime::from_timestamp(1_800_000_000, 0).unwrap();
        assert_eq!(log.due("server", now, now), Some(Expiry::Ended));
        assert_eq!(log.due("node-ca", now, now), Some(Expiry::Ended));
    }
}
