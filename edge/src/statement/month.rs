//! A month of the calendar, in UTC: `2026-11`.

use chrono::{Datelike as _, Months, NaiveDate, NaiveTime};
use domain::Timestamp;
use serde::de::{Deserialize, Deserializer, Error};
use std::fmt;
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// A month of the calendar, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Month {
    /// Its first day.
    first: NaiveDate,
}

impl Month {
    pub(crate) fn of(at: Timestamp) -> Self {
        let day = at.date_naive();
        Self { first: day.with_day(1).unwrap_or(day) }
    }

    fn parse(text: &str) -> Option<Self> {
        let is_plain =
            text.bytes().enumerate().all(|(at, byte)| if at == 4 { byte == b'-' } else { byte.is_ascii_digit() });
        let (year, month) = text.split_once('-').filter(|_| is_plain && text.len() == 7)?;
        let year = year.parse().ok().filter(|year| (2000..=2999).contains(year))?;
        Some(Self { first: NaiveDate::from_ymd_opt(year, month.parse().ok()?, 1)? })
    }

    /// Its first instant.
    pub(crate) fn begins(self) -> Timestamp {
        self.first.and_time(NaiveTime::MIN).and_utc()
    }

    /// The first instant that is not in it.
    pub(crate) fn ends(self) -> Timestamp {
        self.next().begins()
    }

    fn next(self) -> Self {
        Self { first: self.first.checked_add_months(Months::new(1)).unwrap_or(NaiveDate::MAX) }
    }

    /// This month and those before it, latest first.
    pub(crate) fn and_before(self) -> impl Iterator<Item = Self> {
        let before = |month: &Self| month.first.checked_sub_months(Months::new(1)).map(|first| Self { first });
        std::iter::successors(Some(self), before)
    }

    /// For people: `November 2026`.
    pub(crate) fn display_name(self) -> String {
        self.first.format("%B %Y").to_string()
    }
}

impl fmt::Display for Month {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first.format("%Y-%m"))
    }
}

impl<'de> Deserialize<'de> for Month {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| D::Error::custom("expected a month such as 2026-11"))
    }
}

impl PartialSchema for Month {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(SchemaType::new(Type::String))
            .description(Some("A month of the calendar, in UTC."))
            .pattern(Some("^2[0-9]{3}-(0[1-9]|1[0-2])$"))
            .examples([serde_json::json!("2026-11")])
            .into()
    }
}

impl ToSchema for Month {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_month_is_four_digits_a_dash_and_two() {
        for (text, begins, ends) in [
            ("2026-11", "2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z"),
            ("2026-12", "2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z"),
            ("2028-02", "2028-02-01T00:00:00Z", "2028-03-01T00:00:00Z"),
        ] {
            let month = Month::parse(text).unwrap();
            assert_eq!(month.to_string(), text);
            assert_eq!((month.begins(), month.ends()), (begins.parse().unwrap(), ends.parse().unwrap()));
            assert_eq!(Month::of(month.begins()), month);
            assert_eq!(Month::of(month.ends() - chrono::TimeDelta::nanoseconds(1)), month);
        }
        for wrong in [
            "",
            "2026",
            "2026-1",
            "2026-13",
            "2026-00",
            "26-11",
            "2026-11-01",
            "2026-+1",
            "+026-11",
            "２０２６-11",
            "1999-12",
            "9999-12",
        ] {
            assert_eq!(Month::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn months_go_back_over_the_turn_of_the_year() {
        let back: Vec<String> =
            Month::parse("2027-01").unwrap().and_before().take(3).map(|it| it.to_string()).collect();
        assert_eq!(back, ["2027-01", "2026-12", "2026-11"]);
        assert_eq!(Month::parse("2027-01").unwrap().display_name(), "January 2027");
    }
}
