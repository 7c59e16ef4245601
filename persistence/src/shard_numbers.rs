//! Shards as they are stored: by their numbers.

use crate::error::damaged;
use domain::Shard;
use sqlx::Row as _;
use sqlx::postgres::PgRow;

pub(crate) fn numbers(shards: &[Shard]) -> Vec<i16> {
    shards.iter().map(|shard| i16::from(shard.0)).collect()
}

/// The shard of a row with this column.
pub(crate) fn shard(row: &PgRow) -> Result<Shard, sqlx::Error> {
    u8::try_from(row.try_get::<i16, _>("shard")?).map(Shard).map_err(damaged)
}
