//! Money as integers. A price is in minor units of its currency (cents) per GPU and hour.

use serde::{Deserialize, Serialize};

/// An ISO 4217 code in upper case, for example `EUR`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Currency(String);

impl Currency {
    /// # Errors
    /// When `code` is not three upper-case letters.
    pub fn parse(code: &str) -> Result<Self, InvalidPrice> {
        if code.len() == 3 && code.bytes().all(|byte| byte.is_ascii_uppercase()) {
            Ok(Self(code.to_owned()))
        } else {
            Err(InvalidPrice::Currency)
        }
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What an hour of one GPU costs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Price {
    pub currency: Currency,
    /// Minor units per GPU and hour.
    pub amount_minor_per_gpu_hour: i64,
}

/// Above this a typing error is likelier than a price.
pub const HIGHEST_PRICE_MINOR: i64 = 10_000_000;

impl Price {
    /// # Errors
    /// When the amount is negative or beyond [`HIGHEST_PRICE_MINOR`], or the currency is no ISO 4217 code.
    pub fn new(currency: &str, amount_minor_per_gpu_hour: i64) -> Result<Self, InvalidPrice> {
        let currency = Currency::parse(currency)?;
        if !(0..=HIGHEST_PRICE_MINOR).contains(&amount_minor_per_gpu_hour) {
            return Err(InvalidPrice::Amount);
        }
        Ok(Self { currency, amount_minor_per_gpu_hour })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPrice {
    #[error("currency must be three upper-case letters (ISO 4217), for example EUR")]
    Currency,
    #[error("amount_minor_per_gpu_hour must be between 0 and {HIGHEST_PRICE_MINOR}")]
    Amount,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_currency_is_three_upper_case_letters() {
        assert_eq!(Currency::parse("EUR").unwrap().as_str(), "EUR");
        for wrong in ["", "EU", "EURO", "eur", "E R", "EU1", "ÄÖÜ", "€"] {
            assert_eq!(Currency::parse(wrong), Err(InvalidPrice::Currency), "{wrong}");
        }
    }

    #[test]
    fn a_price_is_neither_negative_nor_a_typing_error() {
        for amount in [0, 1, HIGHEST_PRICE_MINOR] {
            assert_eq!(Price::new("EUR", amount).unwrap().amount_minor_per_gpu_hour, amount);
        }
        for amount in [-1, HIGHEST_PRICE_MINOR + 1, i64::MIN, i64::MAX] {
            assert_eq!(Price::new("EUR", amount), Err(InvalidPrice::Amount));
        }
    }

    proptest! {
        #[test]
        fn a_price_decodes_to_itself(code in "[A-Z]{3}", amount in 0..=HIGHEST_PRICE_MINOR) {
            let price = Price::new(&code, amount).unwrap();
            let kept = serde_json::to_string(&price).unwrap();
            prop_assert_eq!(serde_json::from_str::<Price>(&kept).unwrap(), price);
        }
    }
}
