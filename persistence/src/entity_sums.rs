//! What nodes and billing accounts add up to (deploy/decisions/0104): the table of changes that commits append, its compaction, and its
//! comparison with the entities.
//!
//! The sums of a shard are right from its first comparison on, as long as its commits are those of a release that appends changes. A shard
//! of which no comparison was made is not in `counted_shard`: then the entities themselves are added up.

use crate::error::{OperationContext, StoreError, damaged};
use crate::pool::begin;
use crate::shard_numbers::{numbers, shard};
use domain::Visitor;
use domain::id::{EntityKind, EntityRef, Shard, SkuId};
use domain::state_machine::Machine;
use domain::summand::{Amounts, SumGroup, Summand, Sums};
use futures::TryStreamExt as _;
use sqlx::postgres::PgRow;
use sqlx::{PgExecutor, PgPool, Row};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// The kinds whose entities are in sums.
pub const SUMMED_KINDS: [EntityKind; 2] = [EntityKind::Node, EntityKind::BillingAccount];

/// So many entities are decoded before other tasks of the process go on.
const DECODED_AT_ONCE: usize = 64;

/// The sums of each shard.
type ShardSums = BTreeMap<(Shard, SumGroup), Amounts>;

/// The columns of a group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SumColumns<'a> {
    pub(crate) sku: Option<Uuid>,
    pub(crate) sku_name: Option<&'a str>,
    pub(crate) region: Option<&'a str>,
    pub(crate) gpus_free: Option<i32>,
    pub(crate) currency: Option<&'a str>,
    pub(crate) state: Option<&'a str>,
}

impl<'a> SumColumns<'a> {
    pub(crate) fn of(group: &'a SumGroup) -> Self {
        match group {
            SumGroup::Gpus { sku_id, sku, region_code, gpus_free } => Self {
                sku: Some(sku_id.0),
                sku_name: Some(sku),
                region: Some(region_code),
                gpus_free: Some(i32::try_from(*gpus_free).unwrap_or(i32::MAX)),
                ..Self::default()
            },
            SumGroup::Money { currency, state } => {
                Self { currency: Some(currency), state: Some(state), ..Self::default() }
            }
        }
    }
}

/// Sums of one shard that differ from its entities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SumDifference {
    pub shard: Shard,
    pub group: SumGroup,
    /// What the table of sums has.
    pub stored: Amounts,
    /// What the entities add up to.
    pub actual: Amounts,
}

/// The result of [`correct`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SumReport {
    /// What was wrong, and is corrected.
    pub differences: Vec<SumDifference>,
    /// How many entities were added up.
    pub entities: u64,
    /// Entities that cannot be read: they are in no sum.
    pub unreadable: Vec<EntityRef>,
}

/// The sums of some shards' entities, by the entities themselves.
#[derive(Debug, Default)]
pub(crate) struct Scanned {
    pub(crate) sums: ShardSums,
    pub(crate) entities: u64,
    pub(crate) unreadable: Vec<EntityRef>,
}

impl Scanned {
    /// Adds the entities of a kind.
    pub(crate) async fn add<'e>(
        &mut self,
        database: impl PgExecutor<'e>,
        kind: EntityKind,
        shards: &[Shard],
    ) -> Result<(), StoreError> {
        const DOING: &str = "adding up entities";
        let mut rows = sqlx::query("SELECT id, shard, body::text FROM entity WHERE kind = $1 AND shard = ANY ($2)")
            .bind(kind.as_str())
            .bind(numbers(shards))
            .fetch(database);
        let mut decoded = 0_usize;
        while let Some(row) = rows.try_next().await.doing(DOING)? {
            let read = || Ok((row.try_get(0)?, shard(&row)?, row.try_get::<&str, _>(2)?));
            let (id, shard, body) = read().doing(DOING)?;
            match kind.visit(SummandOf(body)) {
                Ok(None) => {}
                Ok(Some(Summand { group, amounts })) => {
                    self.entities += 1;
                    self.sums.entry((shard, group)).or_default().add(amounts);
                }
                Err(_) => self.unreadable.push(EntityRef { kind, id }),
            }
            decoded += 1;
            if decoded.is_multiple_of(DECODED_AT_ONCE) {
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }
}

/// What an entity adds, from its snapshot.
struct SummandOf<'a>(&'a str);

impl Visitor for SummandOf<'_> {
    type Output = Result<Option<Summand>, serde_json::Error>;

    fn visit<M: Machine>(self) -> Self::Output {
        serde_json::from_str::<M>(self.0).map(|entity| entity.summand())
    }
}

/// Compares the sums of these shards with their entities, in one snapshot of the database, and corrects what differs by a further change.
/// Commits go on meanwhile: what they append is not in the snapshot, and neither are their entities.
///
/// # Errors
/// [`StoreError`]; then nothing was corrected.
pub async fn correct(pool: &PgPool, shards: &[Shard]) -> Result<SumReport, StoreError> {
    const DOING: &str = "comparing sums with the entities";
    let mut transaction = begin(pool, "BEGIN ISOLATION LEVEL REPEATABLE READ").await.doing(DOING)?;
    // Of each other comparison alone: two of the same shards would both correct. Before the snapshot, which then has the other's corrections.
    let prepare = "SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = '1s'; LOCK TABLE entity_sum IN SHARE UPDATE EXCLUSIVE MODE";
    sqlx::raw_sql(prepare).execute(&mut *transaction).await.doing(DOING)?;
    let rows = sqlx::query(
        "SELECT shard, kind, sku, sku_name, region, gpus_free, currency, state, sum(entities)::text, sum(gpus_total)::text,
                sum(gpus_sold)::text, sum(gpus_held)::text, sum(balance)::text
         FROM entity_sum WHERE shard = ANY ($1) GROUP BY shard, kind, sku, sku_name, region, gpus_free, currency, state",
    )
    .bind(numbers(shards))
    .fetch_all(&mut *transaction)
    .await
    .doing(DOING)?;
    let mut stored = ShardSums::new();
    for row in &rows {
        // Groups of a newer release are left to it.
        if let Some(group) = group(row).doing(DOING)? {
            stored.insert((shard(row).doing(DOING)?, group), amounts(row, 8).doing(DOING)?);
        }
    }
    let mut scanned = Scanned::default();
    for kind in SUMMED_KINDS {
        scanned.add(&mut *transaction, kind, shards).await?;
    }
    let differences = differences(&stored, &scanned.sums);
    append(&mut *transaction, &differences).await.doing(DOING)?;
    sqlx::query("INSERT INTO counted_shard (shard) SELECT unnest($1::smallint[]) ON CONFLICT DO NOTHING")
        .bind(numbers(shards))
        .execute(&mut *transaction)
        .await
        .doing(DOING)?;
    transaction.commit().await.doing(DOING)?;
    Ok(SumReport { differences, entities: scanned.entities, unreadable: scanned.unreadable })
}

fn differences(stored: &ShardSums, actual: &ShardSums) -> Vec<SumDifference> {
    let keys: BTreeSet<_> = stored.keys().chain(actual.keys()).collect();
    let compared = keys.into_iter().map(|key| SumDifference {
        shard: key.0,
        group: key.1.clone(),
        stored: stored.get(key).copied().unwrap_or_default(),
        actual: actual.get(key).copied().unwrap_or_default(),
    });
    compared.filter(|it| it.stored != it.actual).collect()
}

fn columns(difference: &SumDifference) -> SumColumns<'_> {
    SumColumns::of(&difference.group)
}

/// Appends what leads from the stored amounts to the actual ones.
async fn append(database: impl PgExecutor<'_>, differences: &[SumDifference]) -> Result<(), sqlx::Error> {
    let change = |it: &SumDifference| {
        let mut change = it.stored.negated();
        change.add(it.actual);
        change
    };
    let texts = |of: fn(SumColumns<'_>) -> Option<&str>| -> Vec<Option<String>> {
        differences.iter().map(|it| of(columns(it)).map(str::to_owned)).collect()
    };
    let numbers = |of: fn(Amounts) -> i64| -> Vec<i64> { differences.iter().map(|it| of(change(it))).collect() };
    sqlx::query(
        "INSERT INTO entity_sum (shard, kind, sku, sku_name, region, gpus_free, currency, state, entities, gpus_total, gpus_sold,
                                 gpus_held, balance)
         SELECT * FROM unnest($1::smallint[], $2::text[], $3::uuid[], $4::text[], $5::text[], $6::integer[], $7::text[], $8::text[],
                              $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[])",
    )
    .bind(differences.iter().map(|it| i16::from(it.shard.0)).collect::<Vec<_>>())
    .bind(differences.iter().map(|it| it.group.kind().as_str()).collect::<Vec<_>>())
    .bind(differences.iter().map(|it| columns(it).sku).collect::<Vec<_>>())
    .bind(texts(|it| it.sku_name))
    .bind(texts(|it| it.region))
    .bind(differences.iter().map(|it| columns(it).gpus_free).collect::<Vec<_>>())
    .bind(texts(|it| it.currency))
    .bind(texts(|it| it.state))
    .bind(numbers(|it| it.entities))
    .bind(numbers(|it| it.gpus_total))
    .bind(numbers(|it| it.gpus_sold))
    .bind(numbers(|it| it.gpus_held))
    .bind(numbers(|it| it.balance))
    .execute(database)
    .await
    .map(drop)
}

/// The group of a row; `None` where this release has no such group.
pub(crate) fn group(row: &PgRow) -> Result<Option<SumGroup>, sqlx::Error> {
    let text = |name: &str| row.try_get::<String, _>(name);
    let kind = EntityKind::parse(row.try_get("kind")?);
    if kind == Some(EntityKind::Node) {
        return Ok(Some(SumGroup::Gpus {
            sku_id: SkuId(row.try_get("sku")?),
            sku: text("sku_name")?,
            region_code: text("region")?,
            gpus_free: row.try_get::<i32, _>("gpus_free")?.unsigned_abs(),
        }));
    }
    if kind == Some(EntityKind::BillingAccount) {
        return Ok(Some(SumGroup::Money { currency: text("currency")?, state: text("state")? }));
    }
    Ok(None)
}

/// Five amounts as decimal text, from column `first`. A sum over the bound of the type, which only a manipulated row has, counts as the bound.
pub(crate) fn amounts(row: &PgRow, first: usize) -> Result<Amounts, sqlx::Error> {
    let amount = |n: usize| {
        let sum: i128 = row.try_get::<&str, _>(first + n)?.parse().map_err(damaged)?;
        Ok::<_, sqlx::Error>(i64::try_from(sum.clamp(i64::MIN.into(), i64::MAX.into())).unwrap_or_default())
    };
    Ok(Amounts {
        entities: amount(0)?,
        gpus_total: amount(1)?,
        gpus_sold: amount(2)?,
        gpus_held: amount(3)?,
        balance: amount(4)?,
    })
}

/// The amounts of each group, in whichever shard.
pub(crate) fn without_shards(sums: ShardSums) -> Sums {
    let mut all = Sums::new();
    for ((_, group), amounts) in sums {
        all.entry(group).or_default().add(amounts);
    }
    all
}
