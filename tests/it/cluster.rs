//! Several replicas as one service: any of them serves, one of them may crash, and each shows where every entity is.

use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tests::cluster::fake_clock::FakeClock;
use tests::cluster::{NodeHandle, REGION, TestCluster, WAIT_TIMEOUT, client::Client, id_of};
use uuid::Uuid;

#[tokio::test(flavor = "multi_thread")]
async fn any_replica_serves_any_request_also_after_another_is_killed() {
    let mut cluster = TestCluster::builder().replicas(3).start().await;
    let node = cluster.node_with("h100", &["--simulate-provision-delay-ms", "1500"]).await;
    let users: Vec<Client> = (0..3).map(|index| cluster.at_replica(index, "user")).collect();
    // The allocation waits for the agent until every replica was looked at.
    cluster.lose_agent(&node);
    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 2 });
    let allocation = tests::cluster::AllocationHandle::new(
        id_of(&users[2].post("/api/v1/allocations", &wanted).await.created()),
        users[0].clone(),
    );
    for user in &users {
        let listed = user.get("/api/v1/allocations").await.ok();
        assert!(listed["items"].as_array().unwrap().iter().any(|it| it["id"] == allocation.id.to_string()), "{listed}");
        let seen = allocation.seen_by(user).get().await;
        assert_eq!(seen["state"], "provisioning", "{seen}");
    }

    // The owner of the saga is killed in the middle of it.
    let owner = cluster.owner_of("allocation", allocation.id).await;
    cluster.resume_agent(&node);
    cluster.kill9_replica(owner);
    let allocation = allocation.seen_by(&cluster.user);
    allocation.expect_state("active").await;
    let survivors: Vec<usize> = (0..3).filter(|index| *index != owner).collect();
    for index in &survivors {
        let seen = allocation.seen_by(&users[*index]).get().await;
        assert_eq!(seen["state"], "active", "{seen}");
        expect_all_shards_owned_by(&cluster.at_replica(*index, "admin"), 2).await;
    }

    // A new member gets its share, and no other shard moves.
    cluster.restart_replica(owner).await;
    expect_all_shards_owned_by(&cluster.admin, 3).await;
    allocation.seen_by(&users[owner]).release().await;
    allocation.seen_by(&users[survivors[0]]).expect_state("released").await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}

/// The owners of all shards with their epochs, once no shard has moved for two seconds: the last ones of a handover may be on their
/// way when the shares are fair.
async fn settled_epochs(cluster: &TestCluster) -> Vec<(i16, Uuid, i64)> {
    let until = Instant::now() + WAIT_TIMEOUT;
    let mut before = epochs(cluster).await;
    loop {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let now = epochs(cluster).await;
        if now == before {
            return now;
        }
        assert!(Instant::now() < until, "shards move for {WAIT_TIMEOUT:?}: {:?}", moved(&before, &now));
        before = now;
    }
}

async fn epochs(cluster: &TestCluster) -> Vec<(i16, Uuid, i64)> {
    let statement = "SELECT id, owner, epoch FROM shard ORDER BY id";
    sqlx::query_as(statement).fetch_all(&cluster.pool).await.unwrap()
}

/// The rows of the shards that have moved.
fn moved(before: &[(i16, Uuid, i64)], after: &[(i16, Uuid, i64)]) -> Vec<(i16, Uuid, i64)> {
    after.iter().filter(|row| !before.contains(row)).copied().collect()
}

/// Waits until this many members own all shards, in fair shares.
async fn expect_all_shards_owned_by(admin: &Client, members: usize) {
    let fair = 256 / members;
    let what = format!("{members} members own everything, about {fair} shards each");
    admin
        .wait_until("/api/v1/admin/runtime/cluster", &what, |report| {
            let shares: Vec<usize> =
                report["members"].as_array().unwrap().iter().map(|it| it["shards"].as_array().unwrap().len()).collect();
            report["unowned_shards"] == 0
                && shares.len() == members
                && shares.iter().sum::<usize>() == 256
                && shares.iter().all(|share| share.abs_diff(fair) <= fair / 4)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_cut_off_from_nats_hands_over_its_shards_and_a_nats_outage_moves_none() {
    let mut cluster = TestCluster::builder().replicas(3).start().await;
    let node = cluster.register("h100").await;
    let cut = cluster.owner_of("node", node.id).await;
    let others: Vec<usize> = (0..3).filter(|index| *index != cut).collect();
    let path = format!("/api/v1/admin/nodes/{}/enrollment-token", node.id);
    cluster.nats_links[cut].cut();
    let at = cluster.at_replica(others[0], "admin");
    at.wait_until("/api/v1/admin/runtime/cluster", "the two others own everything", |report| {
        let has_shards = |member: &&Value| member["shards"].as_array().is_some_and(|shards| !shards.is_empty());
        let members = report["members"].as_array().unwrap();
        members.len() == 3 && report["unowned_shards"] == 0 && members.iter().filter(has_shards).count() == 2
    })
    .await;
    // The member that is cut off was not reachable; the new owners of its shards are.
    cluster.at_replica(others[1], "admin").post(&path, &json!({})).await.created();
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let ready = cluster.operator_at(cut).send_once(Method::GET, "/api/v1/readyz", None).await;
        if ready.status == 503 {
            break;
        }
        assert!(Instant::now() < until, "the member that is cut off is ready: {ready}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    // Without NATS the ownership stays as it is, with its epochs.
    let before = settled_epochs(&cluster).await;
    cluster.nats_links.iter().for_each(tests::cluster::flaky_link::FlakyLink::cut);
    tokio::time::sleep(Duration::from_secs(10)).await;
    let moved = moved(&before, &epochs(&cluster).await);
    assert!(moved.is_empty(), "{moved:?}");

    cluster.nats_links.iter().for_each(tests::cluster::flaky_link::FlakyLink::restore);
    expect_all_shards_owned_by(&cluster.admin, 3).await;
    cluster.admin.post(&path, &json!({})).await.created();
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn database_clock_step_moves_no_shard_and_a_crash_is_still_detected() {
    let mut cluster = TestCluster::builder().replicas(3).postgres_clock().start().await;
    expect_all_shards_owned_by(&cluster.admin, 3).await;
    let clock = cluster.postgres_clock.as_ref().unwrap();
    for (from, to) in [(0, 60), (60, -60), (-60, 0)] {
        expect_step_moves_no_shard(&cluster, clock, from, to).await;
    }
    // The clock is set back, so that the last heartbeat of the killed replica is in the future.
    clock.set_offset(chrono::TimeDelta::minutes(-60));
    cluster.kill9_replica(2);
    expect_all_shards_owned_by(&cluster.at_replica(0, "admin"), 2).await;
    cluster.restart_replica(2).await;
    reset_clock(&mut cluster);
    cluster.shutdown().await;
}

/// Steps the clock. A member that the machine has not run for two seconds loses its shards without any step: then the step is made
/// again. One that moves shards moves them each time.
async fn expect_step_moves_no_shard(cluster: &TestCluster, clock: &FakeClock, from: i64, to: i64) {
    let mut seen = Vec::new();
    for _ in 0..3 {
        clock.set_offset(chrono::TimeDelta::minutes(from));
        let before = settled_epochs(cluster).await;
        clock.set_offset(chrono::TimeDelta::minutes(to));
        tokio::time::sleep(Duration::from_secs(4)).await;
        let moved = moved(&before, &epochs(cluster).await);
        if moved.is_empty() {
            return;
        }
        seen.push(moved);
    }
    panic!("a step from {from} to {to} minutes ahead moves shards each time: {seen:?}");
}

fn reset_clock(cluster: &mut TestCluster) {
    cluster.postgres_clock.as_ref().unwrap().set_offset(chrono::TimeDelta::zero());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_replica_shows_owner_wait_reason_and_deadline_of_a_waiting_allocation() {
    let mut cluster = TestCluster::builder().replicas(3).start().await;
    let node = cluster.node("h100").await;
    // Else its owner may change between two looks.
    settled_epochs(&cluster).await;
    cluster.lose_agent(&node);
    let allocation = cluster.rent("h100", 1).await;
    allocation.expect_state("provisioning").await;
    let mut seen = Vec::new();
    for index in 0..3 {
        let admin = cluster.at_replica(index, "admin");
        // The tree is without a member that answers late.
        let path = "/api/v1/admin/runtime/tree?kind=allocation&state=provisioning";
        let is_whole = |tree: &Value| {
            tree["members"].as_array().map(Vec::len) == Some(3) && found_in(tree, allocation.id).is_some()
        };
        let tree = admin.wait_until(path, "three members, and the allocation", is_whole).await;
        let entity = entity_in(&tree, allocation.id);
        assert!(entity["waits_for"].as_str().is_some_and(|why| !why.is_empty()), "{entity}");
        let until: chrono::DateTime<chrono::Utc> = entity["deadline_at"].as_str().unwrap().parse().unwrap();
        assert!(until > chrono::Utc::now() && entity["overdue"] == false, "{entity}");
        let found = admin.get(&format!("/api/v1/admin/runtime/entities/allocation/{}", allocation.id)).await.ok();
        assert!(found.to_string().contains("requested by its user"), "its history stands there: {found}");
        // The tree without a filter shows it too, since it waits.
        let is_shown = |tree: &Value| found_in(tree, allocation.id).is_some();
        admin.wait_until("/api/v1/admin/runtime/tree", "the allocation is shown", is_shown).await;
        seen.push((entity["member_name"].clone(), entity["shard"].clone(), entity["deadline_at"].clone()));
    }
    assert!(seen[0].0.is_string() && seen.iter().all(|at| *at == seen[0]), "{seen:?}");
    cluster.resume_agent(&node);
    allocation.expect_state("active").await;
    allocation.release_fully().await;
    cluster.shutdown().await;
}

fn entity_in(tree: &Value, id: Uuid) -> Value {
    found_in(tree, id).unwrap_or_else(|| panic!("{id} is not in {tree:#}")).clone()
}

fn found_in(tree: &Value, id: Uuid) -> Option<&Value> {
    let entities = tree["entities"].as_array().expect("a tree has entities");
    entities.iter().find(|entity| entity["id"] == id.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn corrupt_snapshot_is_parked_and_shown_while_a_hundred_others_proceed() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let sick = cluster.register("h100").await;
    let mut well = Vec::new();
    for _ in 0..10 {
        well.extend(register_ten(&cluster).await);
    }
    // Passivated at every replica, so that the next command loads it.
    for index in 0..2 {
        cluster.replicas[index].stop().await;
    }
    let statement = "UPDATE entity SET body = '{\"nobody\": \"can read this\"}' WHERE id = $1 RETURNING version";
    let _: i64 = sqlx::query_scalar(statement).bind(sick.id).fetch_one(&cluster.pool).await.unwrap();
    cluster.seal(sick.id).await;
    for index in 0..2 {
        cluster.restart_replica(index).await;
    }
    cluster.allow_parked(sick.id);
    cluster.allow_error(&sick.id.to_string());

    let path = format!("/api/v1/admin/nodes/{}/enrollment-token", sick.id);
    let (poisoned, hundred) = tokio::join!(
        async {
            loop {
                let answer = cluster.admin.send_once(Method::POST, &path, Some(&json!({}))).await;
                assert!(answer.status.is_server_error(), "{answer}");
                answer.expect_error_envelope();
                let tree = cluster.admin.get("/api/v1/admin/runtime/tree?parked=true").await.ok();
                if tree["parked"].as_u64() > Some(0) {
                    break tree;
                }
            }
        },
        futures::future::join_all(well.iter().map(|id| {
            let path = format!("/api/v1/admin/nodes/{id}/enrollment-token");
            let admin = cluster.admin.clone();
            async move { admin.post(&path, &json!({})).await }
        })),
    );
    for answer in hundred {
        answer.created();
    }
    assert_eq!(well.len(), 100);
    let listed = nodes_of_the_tree(&cluster.admin, 40).await;
    assert_eq!(listed.len(), 101, "{listed:?}");
    assert!(well.iter().all(|id| listed.contains(id)) && listed.contains(&sick.id));
    let shown = entity_in(&poisoned, sick.id);
    assert_eq!(shown["status"], "parked", "{shown}");
    assert!(shown["last_error"].is_string() || shown["waits_for"].is_string(), "it says why: {shown}");
    let of_kind = "/api/v1/admin/runtime/tree?parked=true&kind=";
    entity_in(&cluster.admin.get(&format!("{of_kind}node")).await.ok(), sick.id);
    let skus = cluster.admin.get(&format!("{of_kind}sku")).await.ok();
    let (parked, entities) = (&skus["parked"], &skus["entities"]);
    assert_eq!((parked, entities), (&json!(1), &json!([])), "the kind selects among the parked: {skus}");
    // Its shard moves to another process, which finds out without activating it.
    let owner = cluster.owner_of("node", sick.id).await;
    cluster.replicas[owner].stop().await;
    cluster.restart_replica(owner).await;
    expect_all_shards_owned_by(&cluster.admin, 2).await;
    for index in 0..2 {
        // The new owner is registered a moment before it has loaded the parked entities.
        let at = cluster.at_replica(index, "admin");
        let path = "/api/v1/admin/runtime/tree?parked=true";
        let tree = at.wait_until(path, "its new owner shows it as parked", |tree| tree["parked"] == 1).await;
        assert_eq!(entity_in(&tree, sick.id)["status"], "parked", "{tree}");
    }

    // An operator repairs and restarts it, and it works.
    repair(&cluster, &sick, well[0]).await;
    let restart = format!("/api/v1/admin/runtime/entities/node/{}/restart", sick.id);
    cluster.admin.post(&restart, &json!({ "reason": "repaired" })).await.accepted();
    let _ = cluster.bundle(&sick).await;
    let path = "/api/v1/admin/runtime/tree?parked=true";
    cluster.admin.wait_until(path, "nothing is parked", |tree| tree["parked"] == 0).await;
    cluster.shutdown().await;
}

/// The nodes that the tree lists, page by page.
async fn nodes_of_the_tree(admin: &Client, size: usize) -> BTreeSet<Uuid> {
    let (mut ids, mut page) = (BTreeSet::new(), String::new());
    loop {
        let tree = admin.get(&format!("/api/v1/admin/runtime/tree?kind=node&limit={size}{page}")).await.ok();
        let entities = tree["entities"].as_array().expect("a list");
        assert!(entities.len() <= size, "{}", entities.len());
        for entity in entities {
            assert!(ids.insert(id_of(entity)), "{entity} is on two pages");
        }
        assert_eq!(tree["truncated"], !tree["next_page"].is_null());
        let Some(next) = tree["next_page"].as_str() else { return ids };
        page = format!("&page_token={next}");
    }
}

async fn register_ten(cluster: &TestCluster) -> Vec<Uuid> {
    let registering = (0..10).map(|_| {
        let name = format!("well-{}", hex::encode(rand::random::<[u8; 4]>()));
        let body = tests::cluster::node_body(&name, "h100", tests::cluster::GPUS);
        let admin = cluster.admin.clone();
        async move { id_of(&admin.post("/api/v1/admin/nodes", &body).await.created()) }
    });
    futures::future::join_all(registering).await
}

/// Replaces the unreadable snapshot with that of a node like it, as it was when it was registered.
async fn repair(cluster: &TestCluster, sick: &NodeHandle, like: Uuid) {
    let statement = "UPDATE entity SET body = jsonb_set(jsonb_set(sound.body, '{id}', to_jsonb($1::text)), '{life}', \
                     '{\"state\": \"registered\"}') FROM entity sound WHERE entity.id = $1::uuid AND sound.id = $2";
    let done = sqlx::query(statement).bind(sick.id.to_string()).bind(like).execute(&cluster.pool).await.unwrap();
    assert_eq!(done.rows_affected(), 1);
    cluster.seal(sick.id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_of_a_replica_that_hangs_while_sealing_audit_rows_are_taken_over() {
    // The statement of the sealer after it has locked the shards of the rows.
    const SEALS: &str = "INSERT INTO audit_seal%";
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    cluster.register("h100").await;
    cluster.wait_for_balanced_shards().await;
    let lock = cluster.lock_table("audit_seal").await;
    // Enough rows to seal for each of the two: that all are of one of them happens once in a million runs.
    for _ in 0..2 {
        register_ten(&cluster).await;
    }
    lock.expect_blocked_count(SEALS, 2).await;
    cluster.signal_replica(0, Signal::SIGSTOP);
    lock.unlock().await;
    expect_all_shards_owned_by(&cluster.at_replica(1, "admin"), 1).await;
    cluster.signal_replica(0, Signal::SIGCONT);
    expect_all_shards_owned_by(&cluster.at_replica(1, "admin"), 2).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resumed_replica_owns_nothing_and_commits_nothing_under_its_old_epoch() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.register("h100").await;
    let owner = cluster.owner_of("node", node.id).await;
    let other = 1 - owner;
    cluster.signal_replica(owner, Signal::SIGSTOP);
    let admin = cluster.at_replica(other, "admin");
    expect_all_shards_owned_by(&admin, 1).await;
    let path = format!("/api/v1/admin/nodes/{}/enrollment-token", node.id);
    admin.post(&path, &json!({})).await.created();
    cluster.signal_replica(owner, Signal::SIGCONT);
    expect_all_shards_owned_by(&admin, 2).await;
    // The new owner continues from the node's committed state.
    let repeated = cluster.at_replica(owner, "admin");
    assert_eq!(repeated.get(&node.path()).await.ok()["state"], admin.get(&node.path()).await.ok()["state"]);
    repeated.post(&path, &json!({})).await.created();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let issued = cluster.history_of(node.id).await.into_iter().filter(|step| step.command == "issue_token").count();
    assert_eq!(issued, 2, "{:?}", cluster.states_of(node.id).await);
    cluster.shutdown().await;
}
