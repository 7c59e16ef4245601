//! How many servers of the NATS cluster have a copy of each stream.

use anyhow::{Context as _, bail};
use async_nats::jetstream;
use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::CreateStreamErrorKind;
use async_nats::jetstream::stream::{Config, Info, Stream};

/// The setting, as errors name it.
pub const SETTING: &str = "SVC_NATS_STREAM_REPLICAS";

/// The copies that NATS keeps of a stream at most.
pub const COPIES_MAX: usize = 5;

/// Opens the stream, and creates it with so many copies where it is missing.
///
/// # Errors
/// Where JetStream cannot be reached, or the cluster has fewer servers than that.
pub async fn open_stream(context: &jetstream::Context, config: Config, copies: usize) -> anyhow::Result<Stream> {
    let name = config.name.clone();
    let stream = match context.get_or_create_stream(Config { num_replicas: copies, ..config }).await {
        Ok(stream) => stream,
        Err(error) if is_too_small(&error.kind()) => bail!(
            "the NATS cluster has fewer servers with JetStream than the {copies} copies of stream {name} that {SETTING} asks for: add servers, or \
             set {SETTING} to the number of servers"
        ),
        Err(error) => return Err(error).with_context(|| format!("the stream {name} cannot be opened")),
    };
    let has = stream.cached_info().config.num_replicas;
    if has != copies {
        tracing::warn!(
            stream = name,
            has,
            wanted = copies,
            "stream {name} has another number of copies than {SETTING} asks for: `nats stream edit {name} --replicas {copies}` changes it"
        );
    }
    Ok(stream)
}

fn is_too_small(kind: &CreateStreamErrorKind) -> bool {
    let CreateStreamErrorKind::JetStream(error) = kind else { return false };
    [ErrorCode::STREAM_REPLICAS_NOT_SUPPORTED, ErrorCode::CLUSTER_NO_PEERS, ErrorCode::INSUFFICIENT_RESOURCES]
        .contains(&error.error_code())
}

/// How many of the wanted copies do not have everything.
#[must_use]
pub fn missing(info: &Info, copies: usize) -> usize {
    let complete = info.cluster.as_ref().map_or(1, |cluster| {
        let followers = cluster.replicas.iter().filter(|peer| peer.current && !peer.offline).count();
        followers + usize::from(cluster.leader.is_some())
    });
    copies.saturating_sub(complete)
}
