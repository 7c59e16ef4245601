//! Checks of the database, where the API does not show enough.

use super::{TestCluster, WAIT_TIMEOUT};
use domain::allocation::Allocation;
use domain::invariants;
use domain::node::Node;
use domain::{AllocationId, NodeId};
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use sqlx::Row;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// A row of the history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransitionRow {
    pub kind: String,
    pub entity: Uuid,
    pub command: String,
    pub from_state: Option<String>,
    pub to_state: String,
}

impl TestCluster {
    /// Seals a row that the test has written, as an operator does (`gpuaas seal-snapshots`), so that members accept it.
    pub async fn seal(&self, entity: Uuid) {
        let settings = &self.settings;
        let output = tokio::process::Command::new(&settings.executable)
            .args(["seal-snapshots", "--entity", &entity.to_string()])
            .env("SVC_DATABASE_URL", settings.database_url.expose_secret())
            .env("SVC_DATABASE_CA_PATH", &settings.database_ca_path)
            .env("SVC_KEK_FILE", &settings.key_ring_path)
            .output()
            .await
            .expect("gpuaas runs");
        assert!(output.status.success(), "gpuaas seal-snapshots: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The history of one entity, in order.
    pub async fn history_of(&self, entity: Uuid) -> Vec<TransitionRow> {
        let statement =
            "SELECT kind, entity, command, from_state, to_state FROM history WHERE entity = $1 ORDER BY version";
        let rows = sqlx::query(statement).bind(entity).fetch_all(&self.pool).await.expect("the history can be read");
        rows.iter()
            .map(|row| TransitionRow {
                kind: row.get("kind"),
                entity: row.get("entity"),
                command: row.get("command"),
                from_state: row.get("from_state"),
                to_state: row.get("to_state"),
            })
            .collect()
    }

    /// The states that the entity went through, without repetitions.
    pub async fn states_of(&self, entity: Uuid) -> Vec<String> {
        let mut states: Vec<String> = self.history_of(entity).await.into_iter().map(|step| step.to_state).collect();
        states.dedup();
        states
    }

    /// The number of committed transitions of this kind by this command.
    pub async fn count_transitions(&self, kind: &str, command: &str) -> i64 {
        let statement = "SELECT count(*) FROM history WHERE kind = $1 AND command = $2";
        sqlx::query_scalar(statement)
            .bind(kind)
            .bind(command)
            .fetch_one(&self.pool)
            .await
            .expect("the history can be counted")
    }

    /// The audit rows about an entity: actor, action, metadata, correlation id.
    pub async fn audit_of(&self, target: Uuid) -> Vec<(String, String, Value, String)> {
        let statement =
            "SELECT actor, action, metadata, correlation_id FROM audit WHERE target_id = $1 ORDER BY at, seq";
        let rows = sqlx::query(statement).bind(target).fetch_all(&self.pool).await.expect("the audit log can be read");
        rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3))).collect()
    }

    /// Sets a global policy value and waits until every replica that can be asked applies it.
    pub async fn set_policy(&self, key: &str, value: impl Into<Value>) {
        self.set_policies([(key.to_owned(), value.into())]).await;
    }

    /// As [`TestCluster::set_policy`], for several values in this order.
    pub(super) async fn set_policies(&self, values: impl IntoIterator<Item = (String, Value)>) {
        let (mut replicas, mut last, mut next) = (Vec::new(), None, 0);
        while let Some((index, admin)) = self.trusting_replica(next).await {
            replicas.push(admin);
            next = index + 1;
        }
        assert!(!replicas.is_empty(), "{}", super::NO_REPLICA);
        for (key, value) in values {
            let body = json!({ "key": key, "value": value, "reason": "a test" });
            replicas[0].post("/api/v1/admin/policy-values", &body).await.created();
            last = Some((key, value));
        }
        let Some((key, value)) = last else { return };
        // A replica reads all values at once: where the last one holds, the others do.
        let path = format!("/api/v1/admin/policy-values/resolve?key={key}");
        for admin in &replicas {
            let holds = |resolved: &Value| resolved["value"] == value && resolved["source"] != "default";
            admin.wait_until(&path, "the policy value holds", holds).await;
        }
    }

    /// Delays every commit, so that a test can act between two of them.
    pub async fn delay_commits_by(&self, pause: Duration) {
        let function = format!(
            "CREATE OR REPLACE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN PERFORM pg_sleep({}); RETURN NULL; END $$",
            pause.as_secs_f64()
        );
        let trigger =
            "CREATE OR REPLACE TRIGGER slow BEFORE INSERT ON history FOR EACH STATEMENT EXECUTE FUNCTION slow()";
        for statement in [function.as_str(), trigger] {
            sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&self.pool).await.expect("a trigger can be made");
        }
    }

    /// The rows of the outbox: subject and age in seconds.
    pub async fn outbox(&self) -> Vec<(String, f64)> {
        let statement =
            "SELECT subject, extract(epoch FROM now() - written_at)::float8 FROM outbox ORDER BY written_at";
        let rows = sqlx::query(statement).fetch_all(&self.pool).await.expect("the outbox can be read");
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    }

    /// Waits until the outbox is empty.
    pub async fn expect_settled(&self) {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let rows = self.outbox().await;
            if rows.is_empty() {
                return;
            }
            assert!(Instant::now() < until, "events without effect stay in the outbox: {rows:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Asserts invariant I2 over all snapshots: no GPU is held twice, and every allocation's GPUs are held by its node.
    pub async fn expect_every_gpu_held_once(&self) {
        // Both kinds are read in one statement: a saga in flight moves between two reads.
        let statement = "SELECT kind, id, body::text FROM entity WHERE kind IN ('node', 'allocation')";
        let rows = sqlx::query(statement).fetch_all(&self.pool).await.expect("the entities can be read");
        let (mut nodes, mut allocations) = (BTreeMap::new(), BTreeMap::new());
        for row in &rows {
            let (kind, id, body): (String, Uuid, String) = (row.get(0), row.get(1), row.get(2));
            if self.declared.parked.contains(&id) {
                continue;
            }
            let unreadable = |error| panic!("the snapshot of {kind} {id} cannot be read: {error}");
            if kind == "node" {
                let node: Node = serde_json::from_str(&body).unwrap_or_else(unreadable);
                nodes.insert(NodeId(id), node);
            } else {
                let unreadable = |error| panic!("the snapshot of {kind} {id} cannot be read: {error}");
                let allocation: Allocation = serde_json::from_str(&body).unwrap_or_else(unreadable);
                allocations.insert(AllocationId(id), allocation);
            }
        }
        assert!(
            invariants::i2_a_gpu_has_one_tenant(&nodes, &allocations),
            "a GPU is held twice: {nodes:#?} {allocations:#?}"
        );
    }

    /// A NATS client that may see every subject. The client gives up a connection after some seconds, which is then made again.
    pub async fn bus(&self) -> async_nats::Client {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            match self.nats.connect(super::builder::OPERATOR).await {
                Ok(client) => return client,
                Err(error) => assert!(Instant::now() < until, "NATS does not take the operator: {error:#}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
