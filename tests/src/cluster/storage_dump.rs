//! All stored and exposed data of a cluster, as text: every table of Postgres, every message of NATS, every replica's metrics. The secrets
//! that no log may contain must not be in there either.

use super::builder::OPERATOR;
use super::logs::Log;
use super::{TestCluster, WAIT_TIMEOUT};
use async_nats::jetstream;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use futures::{StreamExt as _, TryStreamExt as _};
use std::fmt::Write as _;
use std::time::Duration;

impl TestCluster {
    /// All of it that can be reached now.
    pub(super) async fn dump_storage(&self) -> Vec<Log> {
        let mut stored = self.tables().await;
        stored.extend(self.messages().await);
        for replica in &self.replicas {
            let url = format!("{}/metrics", replica.operations_url());
            // A replica that a test has killed serves no metrics.
            if let Ok(answer) = super::client::send_request(self.admin.http().get(url)).await {
                stored.push(Log { name: format!("the metrics of {}", replica.name()), text: answer.text });
            }
        }
        stored
    }

    /// Every table and partition, one row a line, as JSON.
    async fn tables(&self) -> Vec<Log> {
        let names: Vec<String> = sqlx::query_scalar(
            "SELECT quote_ident(relname::text) FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
             WHERE nspname = 'public' AND relkind = 'r' ORDER BY relname",
        )
        .fetch_all(&self.pool)
        .await
        .expect("the tables can be listed");
        assert!(names.iter().any(|name| name == "entity") && names.iter().any(|name| name == "command"), "{names:?}");
        let mut tables = Vec::new();
        for name in names {
            let query = format!("SELECT row_to_json(searched_row)::text FROM {name} AS searched_row");
            let rows: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(query))
                .fetch_all(&self.pool)
                .await
                .unwrap_or_else(|error| panic!("{name} cannot be read: {error}"));
            tables.push(Log { name: format!("table {name}"), text: rows.join("\n") });
        }
        tables
    }

    /// Every message of every stream, with its subject and headers.
    async fn messages(&self) -> Vec<Log> {
        // A test may end without NATS.
        let Ok(client) = self.nats.connect(OPERATOR).await else { return Vec::new() };
        let mut context = jetstream::new(client);
        // The default is ten seconds, at the end of each test, while others keep the disk busy.
        context.set_timeout(WAIT_TIMEOUT);
        let names: Vec<String> = context.stream_names().try_collect().await.expect("the streams can be listed");
        let mut streams = Vec::new();
        for name in names {
            let mut stream = context.get_stream(&name).await.expect("a listed stream is there");
            let count = stream.info().await.expect("a stream can be asked").state.messages;
            let consumer = stream.create_consumer(jetstream::consumer::pull::OrderedConfig::default()).await;
            let mut messages =
                consumer.expect("a consumer can be made").messages().await.expect("it receives messages");
            let mut text = String::new();
            for _ in 0..count {
                let next = tokio::time::timeout(Duration::from_secs(5), messages.next()).await;
                let Ok(Some(Ok(message))) = next else { break };
                let payload = String::from_utf8_lossy(&message.payload);
                let _ = writeln!(text, "{} {:?} {payload}", message.subject, message.headers);
            }
            streams.push(Log { name: format!("stream {name}"), text });
        }
        streams
    }
}

/// The encodings in which a secret can occur: as it is, in hex and in Base64.
pub(super) fn spellings(secret: &str) -> [String; 4] {
    [secret.to_owned(), hex::encode(secret), STANDARD_NO_PAD.encode(secret), URL_SAFE_NO_PAD.encode(secret)]
}
