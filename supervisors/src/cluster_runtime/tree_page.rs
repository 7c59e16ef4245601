//! Which entities a page of the supervision tree shows.

use persistence::queries::{WaitingEntity, WaitingFilter, WaitingPosition};
use persistence::{Reads, StoreError};
use std::collections::BTreeSet;
use uuid::Uuid;

/// The entities of one page, and after which the next page begins; `None` on the last page.
pub(super) struct TreePage {
    pub(super) entities: Vec<WaitingEntity>,
    pub(super) next: Option<WaitingPosition>,
}

impl TreePage {
    /// From one row more than the page holds, where there is one.
    pub(super) fn of(mut rows: Vec<WaitingEntity>, limit: u32) -> Self {
        let has_more = rows.len() > limit as usize;
        rows.truncate(limit as usize);
        let place = |row: &WaitingEntity| WaitingPosition { deadline_at: row.deadline_at, id: row.entity.id };
        let next = rows.last().filter(|_| has_more).map(place);
        Self { entities: rows, next }
    }

    /// Of the tree without a filter: what has a deadline, the nearest first, then what is `troubled` and has none, by id. The first page
    /// has troubled entities of later pages, too, at most as many as a page holds.
    ///
    /// `waiting`: what has a deadline and follows `after`, one row more than the page holds where there are so many.
    ///
    /// # Errors
    /// [`StoreError`]
    pub(super) async fn of_summary(
        reads: &Reads,
        after: Option<WaitingPosition>,
        waiting: Vec<WaitingEntity>,
        troubled: &[Uuid],
        limit: u32,
    ) -> Result<Self, StoreError> {
        let mut rows = waiting;
        let room = (limit + 1).saturating_sub(u32::try_from(rows.len()).unwrap_or(u32::MAX));
        if room > 0 && !troubled.is_empty() {
            let last = after.filter(|position| position.deadline_at.is_none()).map_or(Uuid::nil(), |it| it.id);
            let idle = WaitingFilter {
                ids: Some(troubled.to_vec()),
                after: Some(WaitingPosition { deadline_at: None, id: last }),
                ..WaitingFilter::default()
            };
            rows.extend(reads.waiting(&idle, room).await?);
        }
        let mut page = Self::of(rows, limit);
        if after.is_none() && page.next.is_some() {
            let known: BTreeSet<_> = page.entities.iter().map(|row| row.entity.id).collect();
            let later = troubled.iter().filter(|id| !known.contains(*id)).copied();
            let ids: Vec<_> = later.take(limit as usize).collect();
            if !ids.is_empty() {
                let later = WaitingFilter { ids: Some(ids), ..WaitingFilter::default() };
                page.entities.extend(reads.waiting(&later, limit).await?);
            }
        }
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use local_servers::test_database::TestDatabase;

    /// SKUs of these numbers; those of `deadlines` have one, in this order.
    async fn stored(all: impl Iterator<Item = u128>, deadlines: &[u128]) -> (TestDatabase, Reads) {
        let db = TestDatabase::fresh().await;
        for id in all.map(Uuid::from_u128) {
            let row = "INSERT INTO entity (id, kind, shard, version, state, body, created_at, updated_at)
                       VALUES ($1, 'sku', 0, 1, 'draft', '{}', now(), now())";
            sqlx::query(row).bind(id).execute(&db.pool).await.unwrap();
        }
        for (minutes, id) in deadlines.iter().enumerate() {
            let row = "INSERT INTO deadline (entity, kind, shard, wake_at, deadline_at, reason)
                       VALUES ($1, 'sku', 0, now(), '2026-01-01'::timestamptz + make_interval(mins => $2), 'an approval')";
            let minutes = i32::try_from(minutes).unwrap();
            sqlx::query(row).bind(Uuid::from_u128(*id)).bind(minutes).execute(&db.pool).await.unwrap();
        }
        let reads = Reads::new(db.pool.clone());
        (db, reads)
    }

    /// The numbers of the entities on each page of the tree without a filter.
    async fn pages(reads: &Reads, troubled: &[u128], limit: u32) -> Vec<Vec<u128>> {
        let troubled: Vec<_> = troubled.iter().copied().map(Uuid::from_u128).collect();
        let (mut pages, mut after) = (Vec::new(), None);
        loop {
            let wanted = WaitingFilter { after, ..WaitingFilter::default() };
            let waiting = reads.waiting(&wanted, limit + 1).await.unwrap();
            let page = TreePage::of_summary(reads, after, waiting, &troubled, limit).await.unwrap();
            pages.push(page.entities.iter().map(|row| row.entity.id.as_u128()).collect());
            after = page.next;
            if after.is_none() {
                return pages;
            }
        }
    }

    #[tokio::test]
    async fn pages_of_the_summary_end_when_every_parked_entity_was_shown() {
        let (_db, reads) = stored(1..=9, &[5, 6, 7]).await;
        // Without a deadline: 1 to 4.
        let troubled = [1, 2, 3, 4, 7];
        assert_eq!(pages(&reads, &troubled, 2).await, [vec![5, 6, 1, 2], vec![7, 1], vec![2, 3], vec![4]]);
        assert_eq!(pages(&reads, &troubled, 4).await, [vec![5, 6, 7, 1, 2, 3, 4], vec![2, 3, 4]]);
        assert_eq!(pages(&reads, &troubled, 7).await, [vec![5, 6, 7, 1, 2, 3, 4]]);
        assert_eq!(pages(&reads, &[], 2).await, [vec![5, 6], vec![7]]);
        assert_eq!(pages(&reads, &[], 3).await, [vec![5, 6, 7]]);
    }
}
