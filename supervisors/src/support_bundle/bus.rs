//! What NATS says of the account, the streams and their consumers.

use super::items::{Collecting, pretty};
use crate::config::installed_settings::InstalledSettings;
use crate::doctor::nats::NatsSession;
use crate::workers::audit_seal::ARCHIVE;
use domain::event::Stream;
use futures::future::join_all;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The consumers of a stream, by the ends of their names.
const CONSUMERS: [&str; 3] = ["reactions", "notifications", "deliveries"];

pub(super) fn streams(settings: &Arc<InstalledSettings>) -> Collecting {
    let settings = Arc::clone(settings);
    Box::pin(async move {
        let session = NatsSession::open(&settings).await?;
        let shown = |answer: Result<Value, String>| answer.unwrap_or_else(|why| json!({ "not_known": why }));
        let account = shown(session.ask("$JS.API.INFO").await);
        let described = Stream::ALL.map(Stream::name).into_iter().map(|name| {
            let (session, shown) = (&session, &shown);
            async move {
                let consumers = CONSUMERS.map(|end| format!("{}-{end}", name.to_lowercase()));
                let asked = consumers.iter().map(|consumer| async move {
                    let info = session.ask(&format!("$JS.API.CONSUMER.INFO.{name}.{consumer}")).await;
                    (consumer.clone(), shown(info))
                });
                let subject = format!("$JS.API.STREAM.INFO.{name}");
                let (stream, consumers) = tokio::join!(session.ask(&subject), join_all(asked));
                (
                    name.to_owned(),
                    json!({ "stream": shown(stream), "consumers": consumers.into_iter().collect::<Map<_, _>>() }),
                )
            }
        });
        let archive = format!("$JS.API.STREAM.INFO.{ARCHIVE}");
        let (described, archive) = tokio::join!(join_all(described), session.ask(&archive));
        let mut streams: Map<String, Value> = described.into_iter().collect();
        streams.insert(ARCHIVE.to_owned(), json!({ "stream": shown(archive) }));
        let server = session.client.server_info();
        Ok(pretty(&json!({
            "server": { "name": server.server_name, "version": server.version, "cluster": server.cluster, "max_payload": server.max_payload },
            "account": account,
            "streams": streams,
        })))
    })
}
