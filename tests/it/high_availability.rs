//! The topology of `deploy/ha`: three Postgres servers under Patroni and etcd, HAProxy, three servers of NATS and three replicas, with the files
//! that are shipped. A failover loses no acknowledged transition; one that lost some nevertheless is noticed.

#![allow(clippy::print_stdout, reason = "figures, for a run with --no-capture")]

use crate::alerts::executed_runbooks::follow;
use crate::alerts::monitoring::{Monitoring, MonitoringOptions};
use crate::backup::block;
use crate::docs_recipes::{REFRESH, followed};
use async_nats::jetstream;
use local_servers::nats::NatsUser;
use nix::sys::signal::Signal;
use reqwest::Method;
use secrecy::ExposeSecret as _;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use supervisors::dev::replica::member;
use supervisors::process_roles::parse_roles;
use tests::cluster::client::Client;
use tests::cluster::haproxy::HaproxyAddresses;
use tests::cluster::nats_cluster::NatsCluster;
use tests::cluster::patroni::PatroniCluster;
use tests::cluster::{REGION, TestCluster, id_of, sku_body};
use tests::skipped_tests::report_skipped;
use uuid::Uuid;

const REPLICATION: &str = "runbooks/ops.replication.md";
const FAILOVER: &str = "runbooks/ops.database.failover.md";
/// The waits of these rules are seconds here.
const RULES: MonitoringOptions<'_> = MonitoringOptions { hurried: &["replication.yaml"], lab_hosts: &[] };
const REPLICAS: usize = 3;
/// Longer than the time to live of a primary's lock, on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Creates SKUs through the balancer all the time, and knows which of them were acknowledged, and when.
struct Workload {
    acknowledged: Arc<Mutex<BTreeMap<Uuid, Instant>>>,
    /// The last response that acknowledged nothing, for messages.
    last_failure: Arc<Mutex<String>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Workload {
    fn start(client: &Client) -> Self {
        let acknowledged: Arc<Mutex<BTreeMap<Uuid, Instant>>> = Arc::default();
        let last_failure: Arc<Mutex<String>> = Arc::default();
        let create = || create_skus(client.clone(), Arc::clone(&acknowledged), Arc::clone(&last_failure));
        let tasks = (0..2).map(|_| tokio::spawn(create())).collect();
        Self { acknowledged, last_failure, tasks }
    }

    fn ids(&self) -> Vec<Uuid> {
        self.acknowledged.lock().unwrap().keys().copied().collect()
    }

    /// When the first one after `instant` was acknowledged.
    async fn next_after(&self, instant: Instant) -> Instant {
        let until = Instant::now() + LIMIT;
        loop {
            let first = self.acknowledged.lock().unwrap().values().copied().filter(|at| *at > instant).min();
            if let Some(first) = first {
                return first;
            }
            let last = self.last_failure.lock().unwrap().clone();
            assert!(Instant::now() < until, "nothing was acknowledged for {LIMIT:?}; the last failure: {last}");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until some more were acknowledged.
    async fn go_on(&self, count: usize) {
        for _ in 0..count {
            self.next_after(Instant::now()).await;
        }
    }

    async fn stop(self) -> Vec<Uuid> {
        for task in &self.tasks {
            task.abort();
        }
        for task in self.tasks {
            let _ = task.await;
        }
        self.acknowledged.lock().unwrap().keys().copied().collect()
    }
}

async fn create_skus(
    client: Client,
    acknowledged: Arc<Mutex<BTreeMap<Uuid, Instant>>>,
    last_failure: Arc<Mutex<String>>,
) {
    loop {
        let body = sku_body(&format!("sku-{}", Uuid::new_v4().simple()), 8);
        let request = client
            .request(Method::POST, "/api/v1/admin/skus")
            .header("Idempotency-Key", Uuid::new_v4().to_string())
            .timeout(Duration::from_secs(15))
            .json(&body);
        match client.try_send(request).await {
            Ok(response) if response.status == reqwest::StatusCode::CREATED => {
                acknowledged.lock().unwrap().insert(id_of(&response.body), Instant::now());
            }
            Ok(response) => *last_failure.lock().unwrap() = response.to_string(),
            Err(error) => *last_failure.lock().unwrap() = format!("{error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(40)).await;
    }
}

/// How long after the first write of a plain client a transition was acknowledged.
async fn measure(what: &str, database: &PatroniCluster, workload: &Workload, began: Instant) {
    let (bare, ours) =
        tokio::join!(database.first_bare_write(), workload.next_after(began + Duration::from_millis(500)));
    let after = ours.saturating_duration_since(bare);
    println!("{what}: a plain client writes after {:?}, the service {after:?} later", bare.duration_since(began));
}

/// Asserts that everything acknowledged is in the database.
async fn expect_nothing_lost(cluster: &TestCluster, ids: &[Uuid], after: &str) {
    let stored: i64 = sqlx::query_scalar("SELECT count(*) FROM entity WHERE id = ANY ($1)")
        .bind(ids)
        .fetch_one(&cluster.pool)
        .await
        .unwrap();
    assert_eq!(usize::try_from(stored).unwrap(), ids.len(), "acknowledged transitions are lost after {after}");
}

async fn lost_commits_by_metric(cluster: &TestCluster) -> u64 {
    cluster.metric_total("commit_lost_transitions_total", &[]).await as u64
}

#[tokio::test(flavor = "multi_thread")]
async fn failovers_of_the_database_lose_no_acknowledged_transition_and_one_that_lost_some_parks_their_entities() {
    if let Some(missing) = PatroniCluster::missing() {
        report_skipped(&missing);
        return;
    }
    let began = Instant::now();
    let mut database = PatroniCluster::start().await.unwrap();
    let mut cluster = TestCluster::builder()
        .replicas(REPLICAS)
        .variable("SVC_DATABASE_URL", &database.url())
        .variable("SVC_DATABASE_CA_PATH", &database.ca_path().display().to_string())
        .variable("SVC_MIGRATE_ON_START", "true")
        .variable(REFRESH.0, REFRESH.1)
        .start()
        .await;
    let config = persistence::pool::PoolConfig::new(database.url().into(), Some(database.ca_path().to_owned()));
    cluster.pool = persistence::pool::open(&config).unwrap();
    let balancer = HaproxyAddresses::on_free_ports().unwrap();
    let _haproxy = balancer.start(&cluster.replicas, database.folder()).unwrap();
    let token = cluster.identity.token_of("admin").unwrap().expose_secret().to_owned();
    let workload =
        Workload::start(&Client::new(cluster.authority.certificate_path(), &balancer.public_url(), Some(token)));
    workload.next_after(began).await;
    println!("the topology serves after {:?}", began.elapsed());

    primary_is_killed(&database, &workload).await;
    expect_nothing_lost(&cluster, &workload.ids(), "a killed primary").await;
    primary_is_frozen(&mut database, &workload).await;
    expect_nothing_lost(&cluster, &workload.ids(), "a frozen primary").await;
    primary_is_cut_from_etcd(&database, &workload).await;
    etcd_has_no_quorum(&mut database, &workload).await;
    expect_nothing_lost(&cluster, &workload.ids(), "etcd's faults").await;
    old_primary_is_back(&mut database, &mut cluster, &workload).await;
    expect_nothing_lost(&cluster, &workload.ids(), "an old primary").await;
    assert_eq!(lost_commits_by_metric(&cluster).await, 0);
    let monitoring = Monitoring::start_with(&cluster, &RULES).await;
    no_standby_is_left(&mut database, &cluster, &workload, &monitoring).await;
    expect_nothing_lost(&cluster, &workload.ids(), "a time without standbys").await;
    standby_without_the_last_second_is_promoted(&mut database, &mut cluster, workload, &monitoring).await;
    cluster.shutdown().await;
    println!("all faults took {:?}", began.elapsed());
}

/// A crash of Postgres alone: Patroni promotes a standby.
async fn primary_is_killed(database: &PatroniCluster, workload: &Workload) {
    let leader = database.leader().await.unwrap();
    let began = Instant::now();
    database.servers[leader].kill9_postgres();
    measure("primary killed", database, workload, began).await;
    database.wait_healthy().await.unwrap();
}

/// The machine stands still, with its connections open. When it goes on, it finds itself replaced.
async fn primary_is_frozen(database: &mut PatroniCluster, workload: &Workload) {
    let leader = database.leader().await.unwrap();
    let began = Instant::now();
    database.servers[leader].signal_all(Signal::SIGSTOP);
    measure("primary frozen", database, workload, began).await;
    database.servers[leader].signal_all(Signal::SIGCONT);
    workload.go_on(5).await;
    database.wait_healthy().await.unwrap();
}

async fn primary_is_cut_from_etcd(database: &PatroniCluster, workload: &Workload) {
    let leader = database.leader().await.unwrap();
    let links = &database.servers[leader].etcd_links;
    let began = Instant::now();
    links.iter().for_each(|link| link.cut());
    // Past the life of its lock.
    tokio::time::sleep(Duration::from_secs(22)).await;
    workload.go_on(5).await;
    links.iter().for_each(|link| link.restore());
    println!("primary cut from etcd: it was {:?} later", began.elapsed());
    database.wait_healthy().await.unwrap();
    workload.go_on(5).await;
}

async fn etcd_has_no_quorum(database: &mut PatroniCluster, workload: &Workload) {
    for member in 1..=2 {
        database.etcd[member].kill9();
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    // Each standby confirms to the primary that it is none itself.
    workload.go_on(5).await;
    for member in 1..=2 {
        database.etcd[member].start().unwrap();
    }
    database.wait_healthy().await.unwrap();
    workload.go_on(5).await;
}

/// The machine of the primary ends, and comes back with its data and without Patroni: it takes writes, on the timeline of before.
async fn old_primary_is_back(database: &mut PatroniCluster, cluster: &mut TestCluster, workload: &Workload) {
    let old = database.leader().await.unwrap();
    let began = Instant::now();
    database.servers[old].kill9();
    measure("machine of the primary ended", database, workload, began).await;
    database.wait_for_other_leader(old).await.unwrap();
    let mut alone = database.servers[old].start_alone(&["synchronous_standby_names="]).unwrap();
    let entities = "SELECT count(*) FROM entity";
    let until = Instant::now() + LIMIT;
    let before = loop {
        if let Ok(count) = database.count(old, entities).await {
            break count;
        }
        assert!(alone.is_running() && Instant::now() < until, "{}", alone.log_tail());
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    database.execute(old, "CREATE TABLE written (at int)").await.expect("it takes writes");
    // A replica that has seen no failover decides likewise.
    cluster.kill9_replica(0);
    cluster.restart_replica(0).await;
    workload.go_on(20).await;
    assert_eq!(database.count(old, entities).await.unwrap(), before, "the service wrote to a primary of the past");
    drop(alone);
    database.servers[old].kill9();
    database.servers[old].start().unwrap();
    database.wait_healthy().await.unwrap();
}

/// Nothing is committed then; the alert's page says which machines to repair.
async fn no_standby_is_left(
    database: &mut PatroniCluster,
    cluster: &TestCluster,
    workload: &Workload,
    monitoring: &Monitoring,
) {
    let leader = database.leader().await.unwrap();
    for standby in (0..3).filter(|server| *server != leader) {
        database.servers[standby].kill9();
    }
    let alert = monitoring.alertmanager.expect("pager", "GPUAASNoSynchronousStandby", true).await;
    let page = format!("deploy/{REPLICATION}");
    database.expect_control(&block(&page, "Look here", "sh,patroni")).await;
    for standby in (0..3).filter(|server| *server != leader) {
        database.servers[standby].start().unwrap();
    }
    database.wait_healthy().await.unwrap();
    workload.go_on(5).await;
    let folder = followed(cluster);
    let seen = follow(folder.path(), &alert, REPLICATION, &["Afterwards"], "").await;
    assert!(seen.matches("replica-").count() >= REPLICAS, "{seen}");
    monitoring.alertmanager.expect("pager", "GPUAASNoSynchronousStandby", false).await;
}

/// What strict replication excludes, and a person can still do: the standby without the last transitions becomes the primary.
async fn standby_without_the_last_second_is_promoted(
    database: &mut PatroniCluster,
    cluster: &mut TestCluster,
    workload: Workload,
    monitoring: &Monitoring,
) {
    let leader = database.leader().await.unwrap();
    let synchronous = database.synchronous_standby().await.unwrap();
    let behind = (0..3).find(|server| ![leader, synchronous].contains(server)).unwrap();
    database.servers[behind].kill9_patroni();
    for setting in ["primary_conninfo", "synchronous_standby_names", "restore_command"] {
        database.execute(behind, &format!("ALTER SYSTEM SET {setting} = ''")).await.unwrap();
    }
    database.execute(behind, "SELECT pg_reload_conf()").await.unwrap();
    let receivers = "SELECT count(*) FROM pg_stat_wal_receiver";
    let until = Instant::now() + LIMIT;
    while database.count(behind, receivers).await.unwrap() > 0 {
        assert!(Instant::now() < until, "a standby without its primary's address still receives");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    workload.go_on(10).await;
    // One that exists before, and is changed.
    let changed = workload.ids()[0];
    let change = serde_json::json!({ "allowed_regions": [REGION, "test-2"] });
    let path = format!("/api/v1/admin/skus/{changed}");
    cluster.admin.request_until_final(Method::PATCH, &path, Some(&change)).await.ok();
    let acknowledged = workload.stop().await;
    database.servers[leader].kill9();
    database.servers[synchronous].kill9();
    database.execute(behind, "SELECT pg_promote()").await.unwrap();
    let ids: Vec<_> = acknowledged.iter().map(|id| format!("'{id}'")).collect();
    let stored = database
        .count(behind, &format!("SELECT count(*) FROM entity WHERE id = ANY (ARRAY[{}]::uuid[])", ids.join(",")))
        .await
        .unwrap();
    let lost = acknowledged.len() - usize::try_from(stored).unwrap();
    assert!(lost > 0, "the promoted standby lacks something");
    // The audit rows of these transitions are lost with them.
    for text in ["is not in the database", "is parked", "the audit log of a shard was changed"] {
        cluster.allow_error(text);
    }
    cluster.allow_changed_audit_log();

    let until = Instant::now() + LIMIT;
    let parked = loop {
        let rows: Vec<Uuid> =
            sqlx::query_scalar("SELECT entity FROM parked").fetch_all(&cluster.pool).await.unwrap_or_default();
        if lost <= rows.iter().filter(|id| acknowledged.contains(id)).count() {
            break rows;
        }
        assert!(Instant::now() < until, "{} of {lost} are parked", rows.len());
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    for id in &parked {
        cluster.allow_parked(*id);
    }
    println!("{lost} acknowledged transitions are lost, {} entities are parked", parked.len());
    assert!(lost_commits_by_metric(cluster).await >= lost as u64);
    let query = "SELECT count(*) FROM parked WHERE reason LIKE 'a failover of the database lost its acknowledged transition to version %'";
    let reasons: i64 = sqlx::query_scalar(query).fetch_one(&cluster.pool).await.unwrap();
    assert!(usize::try_from(reasons).unwrap() >= lost, "each says why");
    let are_counted = |tree: &serde_json::Value| tree["parked"].as_u64().is_some_and(|parked| parked >= lost as u64);
    cluster.admin.wait_until("/api/v1/admin/runtime/tree?parked=true", "they are counted as parked", are_counted).await;
    // The page of the alert: the entity is restarted from the version that the database has.
    let alert = monitoring.alertmanager.expect("pager", "GPUAASCommitsLost", true).await;
    let folder = followed(cluster);
    let entity = format!("sku/{changed}");
    let seen = follow(folder.path(), &alert, FAILOVER, &["Look here"], "").await;
    assert!(seen.contains(&changed.to_string()), "the page shows the entity: {seen}");
    let given = format!("entity={entity}");
    let fixed = follow(folder.path(), &alert, FAILOVER, &["Fix: restart the entity", "Afterwards"], &given).await;
    assert!(!fixed.split_once("--- Afterwards").unwrap().1.contains(&changed.to_string()), "{fixed}");
    let seen = cluster.admin.get(&path).await.ok();
    assert_eq!(seen["allowed_regions"], serde_json::json!([REGION]), "the change is lost: {seen}");
    monitoring.alertmanager.expect("pager", "GPUAASCommitsLost", false).await;
    // What was not lost goes on.
    cluster.admin.post("/api/v1/admin/skus", &sku_body("after-the-loss", 8)).await.created();
}

#[tokio::test(flavor = "multi_thread")]
async fn nats_cluster_survives_the_end_of_its_leader_and_the_replacement_of_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let roles = parse_roles("all").unwrap();
    let names: Vec<_> = (1..=2).map(|number| format!("replica-{number}")).collect();
    let users = names.iter().map(|name| member(name, &roles)).chain([NatsUser::operator("operator")]).collect();
    let mut nats = NatsCluster::start(folder.path(), users).unwrap();
    let mut builder = TestCluster::builder()
        .replicas(2)
        .variable("SVC_NATS_CA_PATH", &nats.ca_path().display().to_string())
        .variable("SVC_NATS_STREAM_REPLICAS", "3");
    for (index, name) in names.iter().enumerate() {
        builder = builder.variable_of(index, "SVC_NATS_URL", &nats.url(name).unwrap());
    }
    let mut cluster = builder.start().await;
    let node = cluster.node("h100").await;
    let observer = jetstream::new(nats.connect("operator").await.unwrap());
    wait_for_copies(&observer, 3).await.unwrap();
    let monitoring = Monitoring::start_with(&cluster, &RULES).await;

    let allocation = cluster.rent("h100", 2).await;
    let leader = leader_of(&observer, "PROVISIONING").await.unwrap();
    let killed = nats.position(&leader).unwrap();
    nats.servers[killed].kill9();
    allocation.expect_state("active").await;
    allocation.release_fully().await;

    let alert = monitoring.alertmanager.expect("tickets", "GPUAASStreamCopiesMissing", true).await;
    assert_eq!(format!("runbooks/{}.md", alert.runbook), REPLICATION);
    // Its machine is gone with all that it stored; an empty one takes its name, as the page says.
    nats.servers[killed].lose_store().unwrap();
    nats.servers[killed].start().unwrap();
    wait_for_copies(&observer, 3).await.unwrap();
    let other = nats.position(&leader_of(&observer, "PROVISIONING").await.unwrap()).unwrap();
    assert_ne!(other, killed, "a server without the stream leads it");
    let allocation = cluster.rent_active("h100", 2).await;
    nats.servers[other].kill9();
    allocation.release_fully().await;
    nats.servers[other].start().unwrap();
    wait_for_copies(&observer, 3).await.unwrap();
    node.expect_all_free().await;
    let missing = |page: &str| {
        page.lines().filter(|line| line.starts_with("nats_stream_copies_missing{") && line.ends_with(" 0")).count()
    };
    let until = Instant::now() + LIMIT;
    while missing(&cluster.operator_at(0).get("/metrics").await.text) < domain::event::Stream::ALL.len() {
        assert!(Instant::now() < until, "{}", cluster.operator_at(0).get("/metrics").await.text);
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    monitoring.alertmanager.expect("tickets", "GPUAASStreamCopiesMissing", false).await;
    cluster.shutdown().await;
}

/// Waits until every stream has so many complete copies.
async fn wait_for_copies(observer: &jetstream::Context, copies: usize) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    for stream in domain::event::Stream::ALL.into_iter().map(|stream| stream.name()).chain(["AUDIT"]) {
        loop {
            let found = observer.get_stream(stream).await;
            let complete = found.as_ref().ok().is_some_and(|found| {
                let info = found.cached_info();
                info.config.num_replicas == copies && supervisors::cluster::stream_copies::missing(info, copies) == 0
            });
            if complete {
                break;
            }
            anyhow::ensure!(Instant::now() < until, "stream {stream}: {found:?}");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
    Ok(())
}

async fn leader_of(observer: &jetstream::Context, stream: &str) -> anyhow::Result<String> {
    let until = Instant::now() + LIMIT;
    loop {
        if let Ok(found) = observer.get_stream(stream).await
            && let Some(leader) = found.cached_info().cluster.as_ref().and_then(|cluster| cluster.leader.clone())
        {
            return Ok(leader);
        }
        anyhow::ensure!(Instant::now() < until, "stream {stream} has no leader");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
