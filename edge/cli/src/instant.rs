//! Instants on the command line (RFC 3339).

use chrono::{DateTime, Utc};

pub(crate) fn parse(text: &str) -> Result<DateTime<Utc>, String> {
    DateTime::parse_from_rfc3339(text).map(Into::into).map_err(|_| {
        "write an instant with its date, time and zone (RFC 3339): 2026-11-22T12:00:00Z, or 2026-11-22T14:00:00+02:00".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instant_has_a_date_a_time_and_a_zone() {
        let noon = parse("2026-11-22T12:00:00Z").unwrap();
        for same in ["2026-11-22T14:00:00+02:00", "2026-11-22 12:00:00Z", "2026-11-22t12:00:00.000z"] {
            assert_eq!(parse(same).unwrap(), noon, "{same}");
        }
        for bad in ["tomorrow", "", "2026-11-22", "2026-11-22T12:00:00", "12:00", "1795694400"] {
            let message = parse(bad).unwrap_err();
            assert!(message.contains("RFC 3339") && message.contains("2026-11-22T12:00:00Z"), "{bad}: {message}");
        }
    }
}
