//! Time, as decisions see it.

use chrono::{DateTime, Utc};

/// An instant, in UTC.
pub type Timestamp = DateTime<Utc>;
