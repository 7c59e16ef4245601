//! Durations on the command line, as `humantime` parses them: `90s`, `15m`, `1h 30m`, `2d`.

use std::time::Duration;

/// The longest duration in the API: an estimate for a year.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| format!("{error}; write a time as 90s, 15m or 8h"))?;
    if time > LONGEST {
        return Err("a time has a year at most".to_owned());
    }
    Ok(time)
}

/// `8h`, `1h 30m`: whole seconds.
pub(crate) fn to_text(time: Duration) -> String {
    humantime::format_duration(Duration::from_secs(time.as_secs())).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_is_numbers_with_units() {
        for (text, seconds) in [("90s", 90), ("15m", 900), ("2h", 7200), ("1h 30m", 5400), ("1d", 86_400), ("0s", 0)] {
            assert_eq!(parse(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for bad in ["", "s", "90", "-1s", "99999999999999999999s", "367d", "1 parsec"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(to_text(Duration::from_millis(5_400_900)), "1h 30m");
    }
}
