//! Months (UTC), by which the logs are partitioned.

use chrono::{DateTime, Datelike, Months, NaiveDate, NaiveTime, Utc};
use domain::state_machine::Timestamp;
use std::fmt;

/// A month of the calendar, as 2026-03.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Month(NaiveDate);

impl Month {
    /// Of `2026-03`, and of no other form.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let first = NaiveDate::parse_from_str(&format!("{text}-01"), "%Y-%m-%d").ok()?;
        let month = Self(first);
        (month.end().is_some() && month.to_string() == text).then_some(month)
    }

    /// The month that `at` lies in.
    #[must_use]
    pub fn of(at: Timestamp) -> Self {
        Self(at.date_naive().with_day(1).unwrap_or_else(|| at.date_naive()))
    }

    /// The instant at which the next month begins; `None` at the end of the calendar.
    #[must_use]
    pub fn end(self) -> Option<DateTime<Utc>> {
        Some(self.0.checked_add_months(Months::new(1))?.and_time(NaiveTime::MIN).and_utc())
    }

    /// As the names of partitions end: `2026_03`.
    #[must_use]
    pub fn suffix(self) -> String {
        format!("{:04}_{:02}", self.0.year(), self.0.month())
    }
}

impl fmt::Display for Month {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}", self.0.year(), self.0.month())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn month_is_read_in_one_form_and_ends_where_the_next_one_begins() {
        let march = Month::parse("2026-03").unwrap();
        assert_eq!((march.to_string(), march.suffix()), ("2026-03".to_owned(), "2026_03".to_owned()));
        assert_eq!(march.end().unwrap().to_rfc3339(), "2026-04-01T00:00:00+00:00");
        assert_eq!(Month::of("2026-03-31T23:59:59Z".parse().unwrap()), march);
        for bad in ["2026-3", "2026-13", "2026-03-01", "", "x", "+2026-03"] {
            assert_eq!(Month::parse(bad), None, "{bad}");
        }
    }
}
