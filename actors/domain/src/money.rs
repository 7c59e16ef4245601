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
