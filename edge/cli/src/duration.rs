//! A time that is given on the command line: `90`, `90s`, `15m`, `2h`.

use std::time::Duration;

/// Longer than anything here can be waited for.
const LONGEST: u64 = 7 * 24 * 3600;

pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let each = match unit {
        "" | "s" => Some(1),
        "m" => Some(60),
        "h" => Some(3600),
        _ => None,
    };
    let seconds = each.and_then(|each| number.parse::<u64>().ok()?.checked_mul(each));
    let seconds = seconds.filter(|seconds| *seconds <= LONGEST);
    seconds.map(Duration::from_secs).ok_or_else(|| "a time is written as 90s, 15m or 2h, a week at most".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_number_and_a_unit() {
        for (text, seconds) in [("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200), ("0", 0)] {
            assert_eq!(parse(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for bad in ["", "s", "1d", "-1", "1.5h", "99999999999999999999s", "169h", "1 m"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
