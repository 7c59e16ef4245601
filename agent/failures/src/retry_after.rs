//! The header `Retry-After` (RFC 9110, section 10.2.3), as servers and the proxies before them write it: seconds, or an HTTP date.

use chrono::{DateTime, TimeDelta, Utc};
use std::time::Duration;

/// The longest wait: a longer one is a mistake of the server or of one of the clocks.
pub const LONGEST: Duration = Duration::from_hours(24);

/// How long to wait by the header, at `now`; [`LONGEST`] at most. A date that has passed is no wait. `None` for a text of neither form.
#[must_use]
pub fn parse(value: &str, now: DateTime<Utc>) -> Option<Duration> {
    let value = value.trim();
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than the type holds are a long wait.
        return Some(value.parse().map_or(LONGEST, Duration::from_secs).min(LONGEST));
    }
    let at = date(value)?;
    // The header has whole seconds: a wait that ends a fraction too early would be refused again.
    let left = at - now + TimeDelta::milliseconds(999);
    Some(Duration::from_secs(left.to_std().unwrap_or_default().as_secs()).min(LONGEST))
}

/// An HTTP date (RFC 9110, section 5.6.7), as in the header `Date`.
#[must_use]
pub fn date(value: &str) -> Option<DateTime<Utc>> {
    httpdate::parse_http_date(value.trim()).ok().map(DateTime::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date_in_each_of_its_three_forms() {
        let now = DateTime::parse_from_rfc3339("2026-11-26T12:00:00Z").unwrap().to_utc();
        let seconds = |value: &str| parse(value, now).map(|wait| wait.as_secs());
        for (value, wait) in [
            ("7", 7),
            (" 120 ", 120),
            ("0", 0),
            // IMF-fixdate, RFC 850 and asctime (RFC 9110, section 5.6.7).
            ("Thu, 26 Nov 2026 12:00:25 GMT", 25),
            ("Thursday, 26-Nov-26 12:00:25 GMT", 25),
            ("Thu Nov 26 12:00:25 2026", 25),
        ] {
            assert_eq!(seconds(value), Some(wait), "{value}");
        }
        let late = now + TimeDelta::milliseconds(300);
        assert_eq!(parse("Thu, 26 Nov 2026 12:00:25 GMT", late), Some(Duration::from_secs(25)), "rounded up");
    }

    #[test]
    fn retry_after_of_the_past_is_no_wait_and_a_distant_one_is_bounded() {
        let now = DateTime::parse_from_rfc3339("2026-11-26T12:00:00Z").unwrap().to_utc();
        for past in ["Thu, 26 Nov 2026 11:59:59 GMT", "Thu, 01 Jan 1970 00:00:00 GMT"] {
            assert_eq!(parse(past, now), Some(Duration::ZERO), "{past}");
        }
        for distant in ["86401", "18446744073709551616", "99999999999999999999999", "Fri, 31 Dec 9999 23:59:59 GMT"] {
            assert_eq!(parse(distant, now), Some(LONGEST), "{distant}");
        }
        for neither in ["", " ", "soon", "-5", "5.3", "1e3", "+7", "7 s", "2026-11-26T12:00:25Z", "Thu, 26 Nov 2026"] {
            assert_eq!(parse(neither, now), None, "{neither}");
        }
    }
}
