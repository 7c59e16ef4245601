//! The header `Retry-After` (RFC 9110, section 10.2.3), as services and the proxies before them write it: seconds, or an HTTP date.

use chrono::Utc;
use failures::retry_after;
use reqwest::header::{DATE, HeaderMap, RETRY_AFTER};
use std::time::Duration;

/// The shortest wait: a server that asks for none, or names a date that has passed, does not get requests without a pause.
const SHORTEST: Duration = Duration::from_millis(100);
/// The longest wait: a longer one is a mistake of the server or of a clock.
const LONGEST: Duration = Duration::from_secs(600);

/// How long the server asks to wait, from [`SHORTEST`] to [`LONGEST`]. `None` where the header is absent, or of neither form.
pub(crate) fn of(headers: &HeaderMap) -> Option<Duration> {
    let text = |name| headers.get(name)?.to_str().ok();
    // By the server's own clock, where it says it: the clock of this machine may differ.
    let now = text(DATE).and_then(retry_after::date).unwrap_or_else(Utc::now);
    Some(retry_after::parse(text(RETRY_AFTER)?, now)?.clamp(SHORTEST, LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use reqwest::header::HeaderValue;

    fn wait(retry_after: &str, date: Option<&str>) -> Option<u64> {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_str(retry_after).unwrap());
        if let Some(date) = date {
            headers.insert(DATE, HeaderValue::from_str(date).unwrap());
        }
        of(&headers).map(|wait| wait.as_secs())
    }

    #[test]
    fn retry_after_is_seconds_or_a_date_by_the_servers_clock() {
        // Of a server whose clock is years away from this machine's.
        let date = Some("Thu, 26 Nov 2020 12:00:00 GMT");
        for (retry_after, seconds) in [
            ("25", Some(25)),
            (" 0 ", Some(0)),
            ("Thu, 26 Nov 2020 12:00:25 GMT", Some(25)),
            ("Thursday, 26-Nov-20 12:00:25 GMT", Some(25)),
            ("Thu Nov 26 12:00:25 2020", Some(25)),
            ("Thu, 26 Nov 2020 11:00:00 GMT", Some(0)),
            ("Fri, 31 Dec 9999 23:59:59 GMT", Some(600)),
            ("99999999999999999999999", Some(600)),
            ("soon", None),
            ("-5", None),
            ("5.3", None),
        ] {
            assert_eq!(wait(retry_after, date), seconds, "{retry_after}");
        }
        assert_eq!(of(&HeaderMap::new()), None);
    }

    #[test]
    fn retry_after_of_a_server_without_a_date_is_by_the_clock_of_this_machine() {
        let soon = (Utc::now() + Duration::from_secs(30)).format("%a, %d %b %Y %H:%M:%S GMT").to_string();
        for date in [None, Some("not a date")] {
            let seconds = wait(&soon, date).unwrap();
            assert!((29..=30).contains(&seconds), "{seconds}");
        }
        assert_eq!(wait("Thu, 26 Nov 2020 12:00:25 GMT", None), Some(0));
    }
}
