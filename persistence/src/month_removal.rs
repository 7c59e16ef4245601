//! The removal of a month of either log.

use crate::audit::{AuditKey, DropMonthError, drop_month};
use crate::retention::{MonthPartition, MonthRemoval, MonthlyLog, detach_month, drop_detached};
use domain::state_machine::Timestamp;
use sqlx::PgPool;

/// Removes a month: detaches it where it is attached, and drops it. A month of the audit log goes with a signed checkpoint for each chain.
///
/// # Errors
/// [`DropMonthError`]; a month that is detached by then is dropped by the next run.
pub async fn remove_month(
    pool: &PgPool,
    key: &AuditKey,
    partition: MonthPartition,
    now: Timestamp,
) -> Result<MonthRemoval, DropMonthError> {
    match partition.log {
        MonthlyLog::Audit => match drop_month(pool, key, &partition.month.to_string(), now).await {
            Ok(_) => Ok(MonthRemoval::Removed),
            Err(DropMonthError::InUse(_)) => Ok(MonthRemoval::InUse),
            Err(error) => Err(error),
        },
        MonthlyLog::History => {
            let is_detached =
                !partition.is_attached || detach_month(pool, partition.month).await? == MonthRemoval::Removed;
            Ok(if is_detached {
                drop_detached(pool, partition.log, partition.month).await?
            } else {
                MonthRemoval::InUse
            })
        }
    }
}
