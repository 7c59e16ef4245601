//! Several replicas as one service: any of them serves, one of them may die, and each can say where everything is.

use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;
use tests::world::{OnboardedNode, REGION, World, client::Client, id_of};
use uuid::Uuid;

#[tokio::test(flavor = "multi_thread")]
async fn any_replica_serves_any_request_and_a_killed_one_is_not_missed() {
    let mut world = World::plan().replicas(3).start().await;
    let node = world.node_with("h100", &["--simulate-provision-delay-ms", "1500"]).await;
    let users: Vec<Client> = (0..3).map(|index| world.at_replica(index, "user")).collect();
    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 2 });
    let allocation = tests::world::Rented::new(
        id_of(&users[2].post("/api/v1/allocations", &wanted).await.created()),
        users[0].clone(),
    );
    for user in &users {
        let listed = user.get("/api/v1/allocations").await.ok();
        assert!(listed["items"].as_array().unwrap().iter().any(|it| it["id"] == allocation.id.to_string()), "{listed}");
        assert_eq!(allocation.seen_by(user).get().await["state"], "provisioning");
    }

    // In the middle of the saga, whoever carries it on dies.
    let owner = world.owner_of("allocation", allocation.id).await;
    world.kill9_replica(owner);
    let allocation = allocation.seen_by(&world.user);
    allocation.expect_state("active").await;
    let survivors: Vec<usize> = (0..3).filter(|index| *index != owner).collect();
    for index in &survivors {
        let seen = allocation.seen_by(&users[*index]).get().await;
        assert_eq!(seen["state"], "active");
        expect_all_shards_owned_by(&world.at_replica(*index, "admin"), 2).await;
    }

    // A new member gets its share, and moves no more than that.
    world.restart_replica(owner).await;
    expect_all_shards_owned_by(&world.admin, 3).await;
    allocation.seen_by(&users[owner]).release().await;
    allocation.seen_by(&users[survivors[0]]).expect_state("released").await;
    node.expect_all_free().await;
    world.end().await;
}

/// Waits until so many members own everything, in fair shares.
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
async fn a_replica_that_nats_does_not_carry_to_hands_its_shards_over_and_nats_gone_for_all_moves_nothing() {
    let mut world = World::plan().replicas(3).start().await;
    let node = world.register("h100").await;
    let cut = world.owner_of("node", node.id).await;
    let others: Vec<usize> = (0..3).filter(|index| *index != cut).collect();
    let path = format!("/api/v1/admin/nodes/{}/enrollment-token", node.id);
    world.nats_lines[cut].cut();
    let at = world.at_replica(others[0], "admin");
    at.wait_until("/api/v1/admin/runtime/cluster", "the two others own everything", |report| {
        let held = |member: &&Value| member["shards"].as_array().is_some_and(|shards| !shards.is_empty());
        let members = report["members"].as_array().unwrap();
        members.len() == 3 && report["unowned_shards"] == 0 && members.iter().filter(held).count() == 2
    })
    .await;
    // Nobody could have asked the one that is cut off; those who own its shards can be asked.
    world.at_replica(others[1], "admin").post(&path, &json!({})).await.created();
    let ready = world.operator_at(cut).once(Method::GET, "/api/v1/readyz", None).await;
    assert_eq!(ready.status, 503, "{ready}");

    // Without NATS at all the cluster stays as it is, under the epochs that it has.
    world.nats_lines.iter().for_each(tests::world::line::Line::cut);
    let epochs = || async {
        let statement = "SELECT id, owner, epoch FROM shard ORDER BY id";
        sqlx::query_as::<_, (i16, Uuid, i64)>(statement).fetch_all(&world.pool).await.unwrap()
    };
    let before = epochs().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(before, epochs().await);

    world.nats_lines.iter().for_each(tests::world::line::Line::mend);
    expect_all_shards_owned_by(&world.admin, 3).await;
    world.admin.post(&path, &json!({})).await.created();
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_of_the_databases_clock_moves_no_shard_and_a_death_is_noticed_under_it() {
    let mut world = World::plan().replicas(3).postgres_clock().start().await;
    expect_all_shards_owned_by(&world.admin, 3).await;
    let epochs = || async {
        let statement = "SELECT id, owner, epoch FROM shard ORDER BY id";
        sqlx::query_as::<_, (i16, Uuid, i64)>(statement).fetch_all(&world.pool).await.unwrap()
    };
    let before = epochs().await;
    let clock = world.postgres_clock.as_ref().unwrap();
    for ahead in [60, -60, 0] {
        clock.put(chrono::TimeDelta::minutes(ahead));
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(before, epochs().await, "{ahead} minutes ahead");
    }
    // The clock goes back, so that the last beat of the one that dies lies in the future.
    clock.put(chrono::TimeDelta::minutes(-60));
    world.kill9_replica(2);
    expect_all_shards_owned_by(&world.at_replica(0, "admin"), 2).await;
    world.restart_replica(2).await;
    clock_right(&mut world);
    world.end().await;
}

fn clock_right(world: &mut World) {
    world.postgres_clock.as_ref().unwrap().put(chrono::TimeDelta::zero());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_replica_shows_where_a_held_back_allocation_lives_why_it_waits_and_until_when() {
    let mut world = World::plan().replicas(3).start().await;
    let node = world.node("h100").await;
    world.lose_agent(&node);
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("provisioning").await;
    let mut seen = Vec::new();
    for index in 0..3 {
        let admin = world.at_replica(index, "admin");
        let tree = admin.get("/api/v1/admin/runtime/tree?kind=allocation&state=provisioning").await.ok();
        let entity = entity_in(&tree, allocation.id);
        assert_eq!(tree["members"].as_array().map(Vec::len), Some(3), "{tree}");
        assert!(entity["waits_for"].as_str().is_some_and(|why| !why.is_empty()), "{entity}");
        let until: chrono::DateTime<chrono::Utc> = entity["deadline_at"].as_str().unwrap().parse().unwrap();
        assert!(until > chrono::Utc::now() && entity["overdue"] == false, "{entity}");
        let found = admin.get(&format!("/api/v1/admin/runtime/entities/allocation/{}", allocation.id)).await.ok();
        assert!(found.to_string().contains("asked for by its user"), "its history stands there: {found}");
        // A summary without a filter shows it too, since it waits.
        entity_in(&admin.get("/api/v1/admin/runtime/tree").await.ok(), allocation.id);
        seen.push((entity["member_name"].clone(), entity["shard"].clone(), entity["deadline_at"].clone()));
    }
    assert!(seen[0].0.is_string() && seen.iter().all(|at| *at == seen[0]), "{seen:?}");
    world.find_agent(&node);
    allocation.expect_state("active").await;
    allocation.release().await;
    allocation.expect_state("released").await;
    world.end().await;
}

fn entity_in(tree: &Value, id: Uuid) -> Value {
    let entities = tree["entities"].as_array().expect("a tree has entities");
    let found = entities.iter().find(|entity| entity["id"] == id.to_string());
    found.unwrap_or_else(|| panic!("{id} is not in {tree:#}")).clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_corrupt_snapshot_is_parked_and_shown_while_a_hundred_others_go_on() {
    let mut world = World::plan().replicas(2).start().await;
    let sick = world.register("h100").await;
    let mut well = Vec::new();
    for _ in 0..10 {
        well.extend(register_ten(&world).await);
    }
    // Asleep everywhere, so that it is read again when somebody needs it.
    for index in 0..2 {
        world.replicas[index].stop().await;
    }
    let statement = "UPDATE entity SET body = '{\"nobody\": \"can read this\"}' WHERE id = $1 RETURNING version";
    let _: i64 = sqlx::query_scalar(statement).bind(sick.id).fetch_one(&world.pool).await.unwrap();
    world.seal(sick.id).await;
    for index in 0..2 {
        world.restart_replica(index).await;
    }
    world.expects_parked(sick.id);
    world.expects_error(&sick.id.to_string());

    let path = format!("/api/v1/admin/nodes/{}/enrollment-token", sick.id);
    let (poisoned, hundred) = tokio::join!(
        async {
            loop {
                let answer = world.admin.once(Method::POST, &path, Some(&json!({}))).await;
                assert!(answer.status.is_server_error(), "{answer}");
                answer.in_envelope();
                let tree = world.admin.get("/api/v1/admin/runtime/tree?parked=true").await.ok();
                if tree["parked"].as_u64() > Some(0) {
                    break tree;
                }
            }
        },
        futures::future::join_all(well.iter().map(|id| {
            let path = format!("/api/v1/admin/nodes/{id}/enrollment-token");
            let admin = world.admin.clone();
            async move { admin.post(&path, &json!({})).await }
        })),
    );
    for answer in hundred {
        answer.created();
    }
    assert_eq!(well.len(), 100);
    let shown = entity_in(&poisoned, sick.id);
    assert_eq!(shown["status"], "parked", "{shown}");
    assert!(shown["last_error"].is_string() || shown["waits_for"].is_string(), "it says why: {shown}");
    // Its shard goes to another process; nobody has to wake it there to find out.
    let owner = world.owner_of("node", sick.id).await;
    world.replicas[owner].stop().await;
    world.restart_replica(owner).await;
    expect_all_shards_owned_by(&world.admin, 2).await;
    for index in 0..2 {
        // Its new owner stands in the books a moment before it has read what is parked.
        let at = world.at_replica(index, "admin");
        let path = "/api/v1/admin/runtime/tree?parked=true";
        let tree = at.wait_until(path, "its new owner shows it as parked", |tree| tree["parked"] == 1).await;
        assert_eq!(entity_in(&tree, sick.id)["status"], "parked", "{tree}");
    }

    // Repaired and started again by an operator, it lives.
    repair(&world, &sick, well[0]).await;
    let restart = format!("/api/v1/admin/runtime/entities/node/{}/restart", sick.id);
    world.admin.post(&restart, &json!({ "reason": "repaired" })).await.accepted();
    let _ = world.bundle(&sick).await;
    let tree = world.admin.get("/api/v1/admin/runtime/tree?parked=true").await.ok();
    assert_eq!(tree["parked"], 0, "{tree}");
    world.end().await;
}

async fn register_ten(world: &World) -> Vec<Uuid> {
    let registering = (0..10).map(|_| {
        let name = format!("well-{}", hex::encode(rand::random::<[u8; 4]>()));
        let body = tests::world::node_body(&name, "h100", tests::world::GPUS);
        let admin = world.admin.clone();
        async move { id_of(&admin.post("/api/v1/admin/nodes", &body).await.created()) }
    });
    futures::future::join_all(registering).await
}

/// Puts a sound body in the place of the unreadable one: that of a node like it, as it was when it was registered.
async fn repair(world: &World, sick: &OnboardedNode, like: Uuid) {
    let statement = "UPDATE entity SET body = jsonb_set(jsonb_set(sound.body, '{id}', to_jsonb($1::text)), '{life}', \
                     '{\"state\": \"registered\"}') FROM entity sound WHERE entity.id = $1::uuid AND sound.id = $2";
    let done = sqlx::query(statement).bind(sick.id.to_string()).bind(like).execute(&world.pool).await.unwrap();
    assert_eq!(done.rows_affected(), 1);
    world.seal(sick.id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_hangs_while_it_seals_the_audit_log_keeps_its_shards_from_nobody() {
    // What the sealer writes once it has locked the shards of what it seals.
    const SEALS: &str = "INSERT INTO audit_seal%";
    let mut world = World::plan().replicas(2).start().await;
    world.register("h100").await;
    let held = world.hold_table("audit_seal").await;
    // Enough to seal for each of the two.
    register_ten(&world).await;
    held.expect_so_many_waiting(SEALS, 2).await;
    world.signal_replica(0, Signal::SIGSTOP);
    held.let_go().await;
    expect_all_shards_owned_by(&world.at_replica(1, "admin"), 1).await;
    world.signal_replica(0, Signal::SIGCONT);
    expect_all_shards_owned_by(&world.at_replica(1, "admin"), 2).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_was_frozen_owns_nothing_any_more_and_commits_nothing_under_its_old_epoch() {
    let mut world = World::plan().replicas(2).start().await;
    let node = world.register("h100").await;
    let owner = world.owner_of("node", node.id).await;
    let other = 1 - owner;
    world.signal_replica(owner, Signal::SIGSTOP);
    let admin = world.at_replica(other, "admin");
    expect_all_shards_owned_by(&admin, 1).await;
    let path = format!("/api/v1/admin/nodes/{}/enrollment-token", node.id);
    admin.post(&path, &json!({})).await.created();
    world.signal_replica(owner, Signal::SIGCONT);
    expect_all_shards_owned_by(&admin, 2).await;
    // Whoever owns the node: it is as the other left it, and goes on from there.
    let again = world.at_replica(owner, "admin");
    assert_eq!(again.get(&node.path()).await.ok()["state"], admin.get(&node.path()).await.ok()["state"]);
    again.post(&path, &json!({})).await.created();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let issued = world.history_of(node.id).await.into_iter().filter(|step| step.command == "issue_token").count();
    assert_eq!(issued, 2);
    world.end().await;
}
