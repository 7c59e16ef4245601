//! SIGKILL of the owner between every two commits of a rental, those of the billing account among them: nothing is lost, no GPU is held
//! twice, the hold is returned, and the ledger is exact. [`COMMITS`] has the commits in their order. `crashes_and_outages` kills one of two
//! replicas at the same steps, at any moment.

use crate::billing::{BALANCE, cost, expect_exact, expected_cost};
use domain::choreography::rental::{COMMITS, RentalCommit, RentalHalf};
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::Row as _;
use std::time::{Duration, Instant};
use tests::cluster::crash_sweep::KillPoint;
use tests::cluster::db_lock::StatementFate;
use tests::cluster::{AllocationHandle, NodeHandle, REGION, TestCluster, WAIT_TIMEOUT, client::Client, id_of};
use uuid::Uuid;

/// A commit of a rental: the kind of its entity, and its command.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Step {
    half: RentalHalf,
    kind: String,
    command: String,
}

const GPUS: u32 = 4;
/// The price of the test SKU in minor units per GPU and hour.
const PRICE: i64 = 250;

#[tokio::test(flavor = "multi_thread")]
async fn kill_of_the_owner_between_any_two_commits_of_a_rental_loses_nothing() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node("h100").await;
    let undisturbed = rent_with_kills(&mut cluster, &node, &[], StatementFate::RolledBack).await;
    let steps = undisturbed.2.clone();
    // The rental has the commits of the table at least. The sweep kills at every one that this rental shows.
    for RentalCommit { half, entity, command, .. } in COMMITS {
        let step = Step { half, kind: entity.to_string(), command: command.to_owned() };
        assert!(steps.contains(&step), "{step:?} is no commit of a rental: {steps:#?}");
    }
    let mut rented = vec![undisturbed];
    for step in &steps {
        // Everything before this commit is durable, and it is not.
        let kills = std::slice::from_ref(step);
        rented.push(rent_with_kills(&mut cluster, &node, kills, StatementFate::RolledBack).await);
    }
    // Each commit is durable, and its reply is lost.
    rented.push(rent_with_kills(&mut cluster, &node, &steps, StatementFate::Committed).await);

    let all = expect_exact(&cluster.user).await;
    for (allocation, released, commits) in &rented {
        let expected = expected_cost(released, PRICE * i64::from(GPUS));
        assert_eq!(cost(&all, allocation.id), (expected, 0), "it is charged once: {released}");
        let count = |it: &[Step], step: &Step| it.iter().filter(|other| *other == step).count();
        for step in &steps {
            let (is, undisturbed) = (count(commits, step), count(&steps, step));
            // A resent request to a node or an account is confirmed by a commit that changes nothing else.
            let may_repeat = step.kind != "allocation";
            assert!(is == undisturbed || may_repeat && is > undisturbed, "{step:?}, {is} times, of {released}");
        }
    }
    cluster.shutdown().await;
}

/// Rents and releases. The replica, which owns every entity, is killed at each of these commits in turn. Returns the allocation, as it was
/// released, and its commits.
async fn rent_with_kills(
    cluster: &mut TestCluster,
    node: &NodeHandle,
    kills: &[Step],
    fate: StatementFate,
) -> (AllocationHandle, Value, Vec<Step>) {
    let user = cluster.user.clone();
    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": GPUS });
    let before = commits(cluster).await.len();
    let request = post(user.clone(), "/api/v1/allocations".to_owned(), wanted);
    let created = with_kills(cluster, request, RentalHalf::Rent, kills, fate).await;
    let allocation = AllocationHandle::new(id_of(&created), user.clone());
    allocation.expect_state("active").await;
    user.wait_until(BALANCE, "its meter runs", |it| it["running"] == 1 && it["held_minor"] == 0).await;
    cluster.expect_settled().await;

    let request = post(user.clone(), format!("{}/release", allocation.path()), json!({}));
    with_kills(cluster, request, RentalHalf::Release, kills, fate).await;
    let released = allocation.expect_state("released").await;
    user.wait_until(BALANCE, "its meter has ended", |it| it["running"] == 0 && it["held_minor"] == 0).await;
    cluster.expect_settled().await;
    node.expect_all_free().await;
    cluster.expect_every_gpu_held_once().await;
    let states = ["requested", "provisioning", "active", "releasing", "released"];
    assert_eq!(cluster.states_of(allocation.id).await, states, "after the deaths at {kills:?}");
    let own = commits(cluster).await.split_off(before);
    let released_at =
        own.iter().position(|(kind, command)| (kind.as_str(), command.as_str()) == ("allocation", "release"));
    let half = |at: usize| if Some(at) < released_at { RentalHalf::Rent } else { RentalHalf::Release };
    let steps = own.into_iter().enumerate().map(|(at, (kind, command))| Step { half: half(at), kind, command });
    (allocation, released, steps.collect())
}

/// Sends the request, and kills the replica at those of the commits that follow from it.
async fn with_kills(
    cluster: &mut TestCluster,
    request: impl Future<Output = Value> + Send + 'static,
    half: RentalHalf,
    kills: &[Step],
    fate: StatementFate,
) -> Value {
    let mut points: Vec<KillPoint> = Vec::new();
    for Step { kind, command, .. } in kills.iter().filter(|step| step.half == half) {
        // A command that commits twice is blocked the first time.
        if !points.iter().any(|known| (&known.kind, &known.command) == (kind, command)) {
            let at_most = Some(cluster.count_transitions(kind, command).await);
            points.push(KillPoint { kind: kind.clone(), command: command.clone(), at_most });
        }
    }
    cluster.request_with_kills(request, points, fate, WAIT_TIMEOUT).await
}

/// Resends the request under one key until it is answered, however often the replica is killed meanwhile.
async fn post(by: Client, path: String, body: Value) -> Value {
    let key = Uuid::new_v4().to_string();
    let until = Instant::now() + 4 * WAIT_TIMEOUT;
    loop {
        let request = by.request(Method::POST, &path).header("Idempotency-Key", &key).json(&body);
        let why = match by.try_send(request).await {
            Ok(answer) if answer.is_transient() => answer.to_string(),
            Ok(answer) => return answer.ok(),
            Err(error) => format!("{error:?}"),
        };
        assert!(Instant::now() < until, "{path} is not answered: {why}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The commits of what takes part in a rental, by kind and command, oldest first; without those that only time or an agent's connection
/// causes.
async fn commits(cluster: &TestCluster) -> Vec<(String, String)> {
    let statement = "SELECT kind, command FROM history \
                     WHERE kind IN ('allocation', 'billing_account', 'node', 'tenant') \
                     AND command NOT IN ('tick', 'heartbeat', 'poll', 'renew', 'identify') ORDER BY at, epoch, seq";
    let rows = sqlx::query(statement).fetch_all(&cluster.pool).await.expect("the history can be read");
    rows.iter().map(|row| (row.get("kind"), row.get("command"))).collect()
}
