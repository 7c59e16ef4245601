//! The rate limit of a cluster: one quota however many replicas are asked, and none where nobody can be asked.

use actors::place::{command_id, shard_of};
use reqwest::Method;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tests::world::World;
use uuid::Uuid;

const LIMIT: u32 = 60;

/// Limits `user`, and nobody else, to one request a second.
async fn limited() -> (World, String) {
    let world = World::plan().replicas(3).start().await;
    world.settled().await;
    let user = world.identity.person("user").expect("there is a user").id.to_string();
    let body = json!({
        "key": "rate_limit.api_requests_per_minute", "value": LIMIT, "scope": { "user_id": user }, "reason": "a test",
    });
    world.admin.post("/api/v1/admin/policy-values", &body).await.created();
    for index in 0..3 {
        let path = format!("/api/v1/admin/policy-values/resolve?key=rate_limit.api_requests_per_minute&user_id={user}");
        let admin = world.at_replica(index, "admin");
        admin.wait_until(&path, "the limit holds", |resolved| resolved["value"] == LIMIT).await;
    }
    (world, user)
}

/// How often the replicas' limiters said this, by the name and labels of the counter.
async fn counted(world: &World, counter: &str) -> u64 {
    let mut sum = 0;
    for index in 0..3 {
        let Ok(figures) =
            world.operator_at(index).try_send(world.operator_at(index).request(Method::GET, "/metrics")).await
        else {
            continue;
        };
        let line = figures.text.lines().find(|line| line.starts_with(counter)).map(str::to_owned);
        sum += line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).unwrap_or(0);
    }
    sum
}

const FAIL_OPEN: &str = "api_ratelimit_fail_open_total{group=\"api\"}";

#[tokio::test(flavor = "multi_thread")]
async fn three_replicas_at_many_times_the_limit_admit_burst_and_rate_times_time() {
    let (world, _) = limited().await;
    let world = Arc::new(world);
    let begin = Instant::now();
    let until = begin + Duration::from_secs(10);
    let mut askers = Vec::new();
    for index in 0..3 {
        let user = world.at_replica(index, "user");
        askers.push(tokio::spawn(async move {
            let (mut admitted, mut asked) = (0_u32, 0_u32);
            while Instant::now() < until {
                let answer = user.once(Method::GET, "/api/v1/skus", None).await;
                asked += 1;
                match answer.status.as_u16() {
                    200 => admitted += 1,
                    429 => assert_eq!(answer.body["details"]["limit"], LIMIT, "{answer}"),
                    _ => panic!("{answer}"),
                }
                assert_eq!(answer.headers["ratelimit-policy"], format!("\"api\";q={LIMIT};w=60"));
            }
            (admitted, asked)
        }));
    }
    let (mut admitted, mut asked) = (0, 0);
    for asker in askers {
        let (some, all) = asker.await.unwrap();
        admitted += some;
        asked += all;
    }
    let elapsed = begin.elapsed().as_secs_f64();
    let expected = f64::from(LIMIT) + f64::from(LIMIT) / 60.0 * elapsed;
    let unasked = counted(&world, FAIL_OPEN).await as f64;
    assert!(f64::from(asked) > 2.0 * expected, "{asked} requests are too few to show anything");
    let admitted = f64::from(admitted);
    assert!(
        admitted >= expected - 3.0 && admitted <= expected + 1.0 + unasked,
        "{admitted}, not {expected} (+ {unasked})"
    );
    let Ok(world) = Arc::try_unwrap(world) else { panic!("somebody still asks") };
    world.end().await;
}

/// The replica that owns the cell's shard.
async fn keeper(world: &World, cell: Uuid) -> usize {
    let cluster = world.admin.get("/api/v1/admin/runtime/cluster").await.ok();
    let owns = |member: &serde_json::Value| member["shards"].as_array().unwrap().contains(&json!(shard_of(cell).0));
    let owner = cluster["members"].as_array().unwrap().iter().find(|member| owns(member)).unwrap()["name"].clone();
    world.replicas.iter().position(|replica| owner == replica.name()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn where_the_keeper_of_a_quota_dies_requests_are_let_in_and_counted() {
    let (mut world, user) = limited().await;
    let ask = async |world: &World, index: usize| {
        world.at_replica(index, "user").once(Method::GET, "/api/v1/skus", None).await.status.as_u16()
    };
    while ask(&world, 0).await == 200 {}
    let cell = command_id(&[b"rate limit", b"api", user.as_bytes()]).0;
    let owner = keeper(&world, cell).await;
    let survivor = (owner + 1) % 3;
    let before = counted(&world, FAIL_OPEN).await;
    world.kill9_replica(owner);
    let killed = Instant::now();
    let mut let_in = 0;
    while killed.elapsed() < Duration::from_millis(2500) {
        let_in += u32::from(ask(&world, survivor).await == 200);
    }
    assert!(let_in > 3, "only {let_in} were let in while nobody could be asked");
    assert!(counted(&world, FAIL_OPEN).await > before);
    // The next owner keeps the quota.
    let until = killed + Duration::from_secs(30);
    while ask(&world, survivor).await == 200 {
        assert!(Instant::now() < until, "nobody limits any more");
    }
    world.restart_replica(owner).await;
    world.end().await;
}

/// What is left of `user`'s quota, as this replica says as soon as it can ask whoever keeps it: until then it lets in and says nothing.
async fn left(world: &World, index: usize) -> u32 {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let answer = world.at_replica(index, "user").once(Method::GET, "/api/v1/skus", None).await;
        if let Some(standing) = answer.headers.get("ratelimit") {
            let standing = standing.to_str().unwrap();
            let left = standing.split(';').find_map(|part| part.strip_prefix("r="));
            return left.unwrap_or_else(|| panic!("{standing}")).parse().unwrap();
        }
        assert!(Instant::now() < until, "nobody says what is left of the quota");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_takes_a_quota_over_in_order_goes_on_counting() {
    let (mut world, user) = limited().await;
    let cell = command_id(&[b"rate limit", b"api", user.as_bytes()]).0;
    let mut owner = keeper(&world, cell).await;
    // It fills again from the first question on.
    let began = Instant::now();
    // Asked there alone, so that nobody else remembers anything.
    for _ in 0..50 {
        left(&world, owner).await;
    }
    // It leaves, and somebody else owns the shard; when it is back, the shard comes back too or stays: in order, either way.
    world.replicas[owner].stop().await;
    let survivor = (owner + 1) % 3;
    let left_over = left(&world, survivor).await;
    let drained = u32::try_from(began.elapsed().as_secs()).unwrap() + 1;
    assert!(left_over <= 10 + drained, "{left_over} are left after {drained} s: the quota began anew");
    world.replicas[owner].start_again().await.unwrap();
    world.settled().await;
    owner = keeper(&world, cell).await;
    let left_over = left(&world, owner).await;
    let drained = u32::try_from(began.elapsed().as_secs()).unwrap() + 1;
    assert!(left_over <= 10 + drained, "{left_over} are left after {drained} s: the quota began anew");
    world.end().await;
}
