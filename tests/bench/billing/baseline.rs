//! The naive implementation: each event updates a balance, by pgbench.

use anyhow::{Context, ensure};
use sqlx::postgres::PgPool;
use std::time::Duration;
use tests::bench::postgres::Postgres;

pub(crate) const CLIENTS: u32 = 16;

/// Which rows are updated.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rows {
    One,
    Spread,
}

pub(crate) struct Baseline<'a> {
    server: &'a Postgres,
    pool: PgPool,
    accounts: usize,
}

impl<'a> Baseline<'a> {
    pub(crate) async fn prepare(server: &'a Postgres, accounts: usize) -> anyhow::Result<Self> {
        let pool = server.database("baseline").await?;
        // Room for the next version of each row on its own page.
        sqlx::query("CREATE TABLE balance (id int PRIMARY KEY, micro bigint NOT NULL) WITH (fillfactor = 50)")
            .execute(&pool)
            .await?;
        sqlx::query("INSERT INTO balance SELECT n, 0 FROM generate_series(1, $1) AS n")
            .bind(i32::try_from(accounts)?)
            .execute(&pool)
            .await?;
        sqlx::query("VACUUM ANALYZE").execute(&pool).await?;
        Ok(Self { server, pool, accounts })
    }

    /// Updates a second.
    pub(crate) async fn load(&self, rows: Rows, each: Duration) -> anyhow::Result<f64> {
        let last = match rows {
            Rows::One => 1,
            Rows::Spread => self.accounts,
        };
        let script = tempfile::NamedTempFile::new()?;
        let text = format!("\\set id random(1, {last})\nUPDATE balance SET micro = micro - 1 WHERE id = :id;\n");
        std::fs::write(script.path(), text)?;
        let before = self.sum().await?;
        let mut pgbench = self.server.pgbench()?;
        pgbench
            .args(["-n", "-M", "prepared", "-j", "2", "-c", &CLIENTS.to_string()])
            .args(["-T", &each.as_secs_f64().ceil().to_string()])
            .arg("-f")
            .arg(script.path())
            .arg("baseline");
        let out = tokio::task::spawn_blocking(move || pgbench.output()).await?.context("running pgbench")?;
        let text = String::from_utf8_lossy(&out.stdout);
        ensure!(out.status.success(), "pgbench: {}\n{text}", String::from_utf8_lossy(&out.stderr));
        ensure!(self.sum().await? < before, "pgbench wrote nothing:\n{text}");
        let rate = text.lines().find_map(|line| line.strip_prefix("tps = ")?.split_whitespace().next()?.parse().ok());
        rate.with_context(|| format!("pgbench printed no rate:\n{text}"))
    }

    async fn sum(&self) -> anyhow::Result<i64> {
        Ok(sqlx::query_scalar("SELECT sum(micro)::bigint FROM balance").fetch_one(&self.pool).await?)
    }
}
