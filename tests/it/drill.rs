//! The drill (`deploy/drill`): the topology of `deploy/ha` under load loses all data of Postgres, and of NATS; it is restored to a point in time as
//! the page says. What clients know to be acknowledged, the restored database and `gpuaas recover-report` must agree.

#![allow(clippy::print_stdout, reason = "the verdict, for a run with --no-capture")]

mod load;
mod site;
mod verdict;

use chrono::{DateTime, DurationRound as _, TimeDelta, Utc};
use load::{DrillLoad, LoadClients, LoadRecords, RENTALS, RentalProgress};
use serde_json::{Value, json};
use site::{SKU, Site};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::{Duration, Instant};
use tests::cluster::patroni::PatroniCluster;
use tests::cluster::{AllocationHandle, REGION};
use tests::skipped_tests::report_skipped;
use uuid::Uuid;
use verdict::{LossVerdict, RestoredDatabase, judge};

/// Rentals of the load, those that the restored database has and whose tenants have ended, one with the terminals, and one that is free.
const NODES: usize = 2 * RENTALS + 2;
/// How long the load runs before and after the point of the restore.
const LOAD: Duration = Duration::from_secs(4);
/// The same in a drill by hand.
const LONG_LOAD: Duration = Duration::from_secs(15);
/// Of the issue: a restore takes at most this much of pgBackRest's own time, and a constant.
const RATIO: f64 = 1.3;
const CONSTANT: Duration = Duration::from_secs(30);

/// How long the drill goes on: `GPUAAS_DRILL_MINUTES`, otherwise one round.
fn minutes() -> Option<Duration> {
    let minutes = std::env::var("GPUAAS_DRILL_MINUTES").ok()?;
    Some(Duration::from_secs(60 * minutes.parse::<u64>().expect("GPUAAS_DRILL_MINUTES is a number")))
}

#[tokio::test(flavor = "multi_thread")]
async fn site_that_lost_its_data_is_restored_with_all_that_was_archived_and_a_list_of_the_rest() {
    if let Some(missing) = PatroniCluster::missing() {
        report_skipped(&missing);
        return;
    }
    let began = Instant::now();
    let mut drill = Drill::start().await;
    println!("the topology serves after {:.1?}", began.elapsed());
    let limit = minutes();
    loop {
        drill.round(limit.map_or(LOAD, |_| LONG_LOAD)).await;
        if limit.is_none_or(|limit| began.elapsed() > limit) {
            break;
        }
    }
    let (rounds, violations) = (drill.rounds, drill.violations.clone());
    drill.end().await;
    println!("VERDICT: {rounds} rounds in {:.0?}, {} violations", began.elapsed(), violations.len());
    assert!(violations.is_empty(), "{violations:#?}");
}

struct Drill {
    site: Site,
    records: LoadRecords,
    rounds: usize,
    violations: Vec<String>,
}

impl Drill {
    async fn start() -> Self {
        let mut site = Site::start().await;
        // A replica that is started too early; results of tasks of the lost time; chains of which NATS has newer heads.
        for text in ["gpuaas: ", "the control plane will not take the result", "the audit log of a shard was changed"] {
            site.cluster.allow_error(text);
        }
        Self { site, records: LoadRecords::default(), rounds: 0, violations: Vec::new() }
    }

    /// Load, backup, load, loss of everything, restore, verdict. Odd rounds lose NATS as well and restore to a time; even ones restore all that
    /// was archived.
    async fn round(&mut self, load_time: Duration) {
        self.rounds += 1;
        let with_nats = self.rounds % 2 == 1;
        self.site.complete_nodes(NODES).await;
        let load = self.start_load().await;
        load.go_on(load_time / 2).await;
        self.site.back_up(self.rounds == 1).await;
        load.go_on(load_time).await;

        // The target is a whole second, after the end of the backup and before a commit that is archived.
        let target = Utc::now().duration_trunc(TimeDelta::seconds(1)).unwrap() + TimeDelta::seconds(1);
        let archived_until = target;
        tokio::time::sleep((target - Utc::now()).to_std().unwrap_or_default() + Duration::from_millis(300)).await;
        self.site.archive().await;
        load.go_on(load_time).await;

        load.expect_alive();
        let leader = self.site.lose_data(with_nats).await;
        let (lost_at, lost) = (Utc::now(), Instant::now());
        self.records = load.stop().await;
        let target = if with_nats { target.format("%Y-%m-%d %H:%M:%S+00").to_string() } else { "latest".to_owned() };
        println!(
            "round {}: all data of Postgres{} is lost; the target is {target}",
            self.rounds,
            if with_nats { " and NATS" } else { "" }
        );

        let times = self.site.restore(leader, &target, with_nats).await;
        let restored = self.read().await;
        let refused = self.site.refusal().await;
        self.check(refused.contains("exit status: 78") && refused.contains("gpuaas begin-incarnation"), || {
            format!("a replica starts before an incarnation is begun: {refused}")
        });
        let copies = self.site.copy_nodes().await;
        let (code, report) = self.site.recover_report(&copies).await;
        let expected = if with_nats { 2 } else { 1 };
        self.check(code == Some(expected), || format!("recover-report ended with {code:?}: {report:#}"));
        let verdict = judge(&self.records, &restored, archived_until, &report, !with_nats);
        self.records.retain(|it| restored.has(it));
        self.site.begin_incarnation().await;
        self.site.start_replicas().await;
        self.quarantine(&copies, &report).await;
        self.first_rental().await;
        let rented = lost.elapsed();

        let restored_to: DateTime<Utc> = report["restored_to"].as_str().expect("it ends somewhere").parse().unwrap();
        self.print(&verdict, &report, lost_at - restored_to);
        let bound = times.pgbackrest.mul_f64(RATIO) + CONSTANT;
        println!(
            "  RTO: the first rented node after {rented:.1?}. pgBackRest {:.1?}, recovered after {:.1?}, replicated after {:.1?}; \
             1.3 times pgBackRest's time and 30 s are {bound:.1?}",
            times.pgbackrest, times.recovered, times.replicated
        );
        self.violations.extend(verdict.violations);
        self.settle().await;
    }

    async fn start_load(&mut self) -> DrillLoad {
        let cluster = &self.site.cluster;
        let terminals = cluster.rent_active(SKU, 1).await;
        let clients = LoadClients {
            admin: cluster.admin.clone(),
            user: cluster.user.clone(),
            gateway: cluster.gateway().at(self.site.balancer.public()),
            processor: cluster.processor_client(),
            terminals_on: terminals.id,
            sku: SKU,
        };
        DrillLoad::start(&clients, std::mem::take(&mut self.records))
    }

    fn check(&mut self, holds: bool, violation: impl FnOnce() -> String) {
        if !holds {
            self.violations.push(violation());
        }
    }

    /// What the database has of the records' entities.
    async fn read(&self) -> RestoredDatabase {
        let ids: BTreeSet<Uuid> = self.records.acknowledged.iter().map(|it| it.entity).collect();
        let ids: Vec<Uuid> = ids.into_iter().collect();
        let pool = &self.site.cluster.pool;
        let history: Vec<(Uuid, String)> =
            sqlx::query_as("SELECT entity, to_state FROM history WHERE entity = ANY ($1)")
                .bind(&ids)
                .fetch_all(pool)
                .await
                .unwrap();
        let states = persistence::Reads::new(pool.clone()).states_of(&ids).await.unwrap();
        RestoredDatabase { history: history.into_iter().collect(), states }
    }

    /// The report's next step: nodes with a tenant that the database does not know are out of rent.
    async fn quarantine(&mut self, copies: &std::path::Path, report: &Value) {
        let losses = report["losses"].as_array().expect("a report has losses");
        let tenants = losses.iter().filter(|loss| loss["kind"] == "tenant_without_allocation");
        let tenants: Vec<_> =
            tenants.filter_map(|loss| loss["subject"].as_str()?.strip_prefix("allocation/")).collect();
        let mut rentable = Vec::new();
        for node in std::mem::take(&mut self.site.nodes) {
            let folder = copies.join(&node.name).join("allocations");
            if tenants.iter().any(|id| folder.join(id).join("allocation.json").exists()) {
                node.order("quarantine").await.ok();
            } else {
                rentable.push(node);
            }
        }
        self.site.nodes = rentable;
    }

    async fn first_rental(&self) {
        let wanted = json!({ "sku": SKU, "region_code": REGION, "gpu_count": 1, "queue_seconds": 60 });
        let user = &self.site.cluster.user;
        let created = user.post("/api/v1/allocations", &wanted).await.created();
        AllocationHandle::new(tests::cluster::id_of(&created), user.clone()).expect_state("active").await;
    }

    fn print(&self, verdict: &LossVerdict, report: &Value, lost_time: TimeDelta) {
        println!(
            "  RPO: {} of {} acknowledged transitions are lost, the oldest of {}; the database ends {:.1} s before the loss",
            verdict.lost,
            verdict.lost + self.records.acknowledged.len(),
            verdict.lost_since.map_or("no time".to_owned(), |at| at.to_rfc3339()),
            lost_time.as_seconds_f64(),
        );
        let mut kinds = BTreeMap::<&str, usize>::new();
        for loss in report["losses"].as_array().into_iter().flatten() {
            *kinds.entry(loss["kind"].as_str().unwrap_or_default()).or_default() += 1;
        }
        println!("  listed: {kinds:?}; {} of them are known to clients", verdict.to_be_listed);
        for violation in &verdict.violations {
            println!("  VIOLATION: {violation}");
        }
    }

    /// Every rental that the database has ends; then the books are balanced, and no GPU is held twice, in the database and on the nodes.
    async fn settle(&mut self) {
        self.expect_no_gpu_twice_on_nodes().await;
        let cluster = &self.site.cluster;
        let unfinished = "SELECT id FROM entity WHERE kind = 'allocation' AND state <> 'released'";
        let ids: Vec<Uuid> = sqlx::query_scalar(unfinished).fetch_all(&cluster.pool).await.unwrap();
        for id in &ids {
            let rental = AllocationHandle::new(*id, cluster.user.clone());
            let state = rental.get().await["state"].clone();
            if ["requested", "provisioning", "active"].iter().any(|it| state == *it) {
                rental.release().await;
            }
        }
        for id in ids {
            AllocationHandle::new(id, cluster.user.clone())
                .expect_state_within(Duration::from_secs(120), "released")
                .await;
            if let Some(progress) = self.records.rentals.get_mut(&id) {
                *progress = RentalProgress::Released;
            }
        }
        cluster.expect_settled().await;
        cluster.expect_every_gpu_held_once().await;
        let ledger = persistence::Reads::new(cluster.pool.clone()).verify_ledger().await.unwrap();
        self.check(ledger.holds(), || format!("the ledger does not sum to zero: {ledger:?}"));
        self.expect_no_gpu_twice_on_nodes().await;
    }

    async fn expect_no_gpu_twice_on_nodes(&mut self) {
        let copies = self.site.copy_nodes().await;
        for node in fs::read_dir(&copies).unwrap() {
            let mut held = BTreeMap::new();
            for allocation in fs::read_dir(node.unwrap().path().join("allocations")).unwrap() {
                let record = allocation.unwrap().path().join("allocation.json");
                let Ok(text) = fs::read(&record) else { continue };
                let record: Value = serde_json::from_slice(&text).unwrap();
                for device in record["devices"].as_array().expect("a record has devices") {
                    let gpu = device["uuid"].as_str().expect("a GPU has its UUID").to_owned();
                    let tenant = record["allocation_id"].clone();
                    if let Some(other) = held.insert(gpu.clone(), tenant.clone()) {
                        self.violations.push(format!("GPU {gpu} is held by {tenant} and by {other}"));
                    }
                }
            }
        }
    }

    async fn end(mut self) {
        for secret in std::mem::take(&mut self.records.secrets) {
            self.site.cluster.register_secret("a token or client secret of the load", &secret);
        }
        self.site.database.wait_healthy().await.unwrap();
        if self.rounds > 1 {
            // NATS has heads of chains that the restored database lacks.
            self.site.cluster.allow_changed_audit_log();
        }
        self.site.cluster.shutdown().await;
    }
}
