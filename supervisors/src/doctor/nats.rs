//! NATS: the connection, JetStream's limits, the streams and their copies, the clock, and what this member's user may do.

use super::postgres::judge_clock;
use crate::cluster::clock::ClockOffset;
use crate::cluster::nats::{ServerErrors, connect_once, user_of};
use crate::cluster::nats_permissions;
use crate::config::installed_settings::InstalledSettings;
use crate::process_roles::{ProcessRole, parse_roles};
use crate::workers::audit_seal::ARCHIVE;
use async_nats::{Client, RequestErrorKind};
use chrono::{DateTime, Utc};
use domain::event::Stream;
use futures::future::join_all;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::diagnosis::DiagnosticFinding;

const OLDEST: (u32, u32) = (2, 10);
/// The server's default. An event is far smaller; a page of a terminal's output is not.
const LEAST_PAYLOAD: usize = 1024 * 1024;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// No stream of this name, as JetStream numbers its errors.
const STREAM_NOT_FOUND: u64 = 10_059;

const PERMISSIONS: &str =
    "give the user what `gpuaas nats-permissions --name NAME --roles ROLES` prints, and reload NATS";

/// The answer of JetStream's API.
enum Answer {
    Json(Value),
    /// JetStream does not run, or not for this account.
    NoResponders,
    /// The server dropped the request, or does not answer.
    Silence(String),
}

/// A connection as the member of the settings.
pub(crate) struct NatsSession {
    pub(crate) client: Client,
    errors: ServerErrors,
    /// The user of NATS, which the permissions are for: the replicas of a Deployment share one.
    user: String,
}

impl NatsSession {
    /// # Errors
    /// Why there is none.
    pub(crate) async fn open(settings: &InstalledSettings) -> Result<Self, String> {
        let url = settings.get("SVC_NATS_URL").ok_or("SVC_NATS_URL is not set")?;
        let user = user_of(&url);
        let name = settings.get("SVC_MEMBER_NAME").or_else(|| user.clone());
        let name = name.unwrap_or_else(|| "gpuaas-doctor".to_owned());
        let ca = settings.get("SVC_NATS_CA_PATH").map(PathBuf::from);
        let (client, errors) =
            connect_once(&url.into(), ca.as_deref(), &name).await.map_err(|error| format!("{error:#}"))?;
        // As the inbox of answers: without a user it is the member's.
        Ok(Self { client, errors, user: user.unwrap_or(name) })
    }

    /// The answer of JetStream's API, errors included.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) async fn ask(&self, subject: &str) -> Result<Value, String> {
        match request(&self.client, subject).await {
            Answer::Json(answer) => Ok(answer),
            Answer::NoResponders => Err("JetStream is not enabled for this account".to_owned()),
            Answer::Silence(why) => Err(why),
        }
    }
}

pub(super) async fn examine(settings: Arc<InstalledSettings>) -> Vec<DiagnosticFinding> {
    let NatsSession { client, errors, user } = match NatsSession::open(&settings).await {
        Ok(session) => session,
        Err(error) => return vec![judge_connection(&error)],
    };
    let mut findings = judge_server(&client.server_info());
    let roles = parse_roles(&settings.roles()).unwrap_or_default();
    subscribe(&client, &nats_permissions::for_member(&user, &roles).subscribe).await;
    let account = request(&client, "$JS.API.INFO").await;
    findings.push(judge_account(&account));
    if matches!(account, Answer::NoResponders) {
        return findings;
    }
    let is_clustered = client.server_info().cluster.is_some();
    // The other roles may not ask for the archive.
    let archive = roles.contains(&ProcessRole::Entities).then_some(ARCHIVE);
    let names = Stream::ALL.map(Stream::name).into_iter().chain(archive);
    let asked = names.map(|stream| {
        let client = &client;
        async move {
            let sent = Instant::now();
            (stream, request(client, &format!("$JS.API.STREAM.INFO.{stream}")).await, sent.elapsed() / 2)
        }
    });
    // At once: one that is refused is not answered.
    let streams = join_all(asked).await;
    let clock = streams.iter().find_map(|(_, answer, within)| match answer {
        Answer::Json(info) => offset(info, *within),
        Answer::NoResponders | Answer::Silence(_) => None,
    });
    findings.extend(streams.iter().filter_map(|(name, answer, _)| judge_stream(name, answer, is_clustered)));
    findings.extend(clock.map(|offset| judge_clock("NATS", offset)));
    findings.push(judge_permissions(&user, &errors));
    findings
}

fn judge_connection(error: &str) -> DiagnosticFinding {
    let summary = format!("no connection to NATS: {error}");
    let action = if error.contains("authorization") {
        "correct user and password in SVC_NATS_URL, and compare them with the server's configuration"
    } else if error.contains("tls") || error.contains("TLS") || error.contains("certificate") {
        "correct SVC_NATS_CA_PATH: it must name the authority of the server's certificate, and the URL the host that is in it"
    } else if error.contains("is not set") {
        "set it; see Configuration"
    } else {
        "start NATS, or correct host and port in SVC_NATS_URL; check the network between"
    };
    DiagnosticFinding::error(summary, action)
}

fn judge_server(info: &async_nats::ServerInfo) -> Vec<DiagnosticFinding> {
    let mut parts = info.version.split('.').map(|part| part.parse::<u32>().unwrap_or_default());
    let version = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let mut findings = Vec::new();
    if version < OLDEST {
        let summary = format!("NATS {} is too old; the service needs {}.{} or later", info.version, OLDEST.0, OLDEST.1);
        findings.push(DiagnosticFinding::error(summary, "upgrade nats-server"));
    } else {
        findings.push(DiagnosticFinding::ok(format!("NATS {}", info.version)));
    }
    if info.max_payload < LEAST_PAYLOAD {
        findings.push(DiagnosticFinding::error(
            format!("max_payload is {} bytes; messages of members have up to {LEAST_PAYLOAD}", info.max_payload),
            "set max_payload to 1MB, which is the default, or more",
        ));
    }
    if info.lame_duck_mode {
        let summary = "this server is about to stop (lame duck mode)";
        findings.push(DiagnosticFinding::warning(summary, "wait for its replacement, or name another server"));
    }
    findings
}

/// Asks for subjects that no message has, where the permission is a pattern: the server refuses those that it does not allow.
async fn subscribe(client: &Client, patterns: &std::collections::BTreeSet<String>) {
    for pattern in patterns.iter().filter(|pattern| pattern.contains(['*', '>'])) {
        let subject = pattern.replace(['*', '>'], "doctor");
        if let Ok(mut subscription) = client.subscribe(subject).await {
            let _ = subscription.unsubscribe().await;
        }
    }
}

async fn request(client: &Client, subject: &str) -> Answer {
    let request = async_nats::Request::new().timeout(Some(ANSWER_TIMEOUT)).payload("".into());
    match client.send_request(subject.to_owned(), request).await {
        Ok(message) => match strict_json::from_slice(&message.payload) {
            Ok(answer) => Answer::Json(answer),
            Err(error) => Answer::Silence(format!("the answer cannot be read: {error}")),
        },
        Err(error) if error.kind() == RequestErrorKind::NoResponders => Answer::NoResponders,
        Err(error) => Answer::Silence(error.to_string()),
    }
}

fn judge_account(answer: &Answer) -> DiagnosticFinding {
    let off = || {
        DiagnosticFinding::error(
            "JetStream is not enabled for this account",
            "add `jetstream { store_dir: … }` to the server's configuration, and `jetstream: enabled` to the account",
        )
    };
    let info = match answer {
        Answer::NoResponders => return off(),
        Answer::Json(info) if info["error"].is_object() => return off(),
        Answer::Silence(why) => {
            return DiagnosticFinding::warning(
                format!("the account's limits of JetStream are not known: {why}"),
                PERMISSIONS,
            );
        }
        Answer::Json(info) => info,
    };
    let used = |of: &str| info[of].as_u64().unwrap_or_default();
    // A limit of -1 is none.
    let limit = |of: &str| info["limits"][of].as_i64().and_then(|limit| u64::try_from(limit).ok());
    let mebibytes = used("storage") / (1024 * 1024);
    if limit("max_storage") == Some(0) {
        return DiagnosticFinding::error(
            "JetStream has no storage for this account (max_storage is 0)",
            "raise max_file of the account and max_file_store of the server",
        );
    }
    for (what, of, bound) in [("storage", "storage", "max_storage"), ("memory", "memory", "max_memory")] {
        if let Some(most) = limit(bound).filter(|most| *most > 0 && used(of) > most / 10 * 9) {
            return DiagnosticFinding::warning(
                format!("JetStream uses {} of {most} bytes of {what}", used(of)),
                "raise the account's limit, or find the stream that grows: `nats stream report`",
            );
        }
    }
    let needed = u64::try_from(Stream::ALL.len() + 1).unwrap_or_default();
    if let Some(most) = limit("max_streams").filter(|most| *most > 0 && *most < needed) {
        return DiagnosticFinding::error(
            format!("the account may have {most} streams; the service makes {needed}"),
            "raise max_streams of the account",
        );
    }
    let bound = limit("max_storage")
        .map_or_else(|| "no limit".to_owned(), |most| format!("at most {} MiB", most / (1024 * 1024)));
    DiagnosticFinding::ok(format!("JetStream stores {mebibytes} MiB for this account ({bound})"))
}

fn judge_stream(name: &str, answer: &Answer, is_clustered: bool) -> Option<DiagnosticFinding> {
    let info = match answer {
        Answer::NoResponders => return None,
        Answer::Silence(why) => {
            return Some(DiagnosticFinding::error(format!("the stream {name} does not answer: {why}"), PERMISSIONS));
        }
        Answer::Json(info) => info,
    };
    if let Some(error) = info["error"].as_object() {
        let is_absent = error.get("err_code").and_then(Value::as_u64) == Some(STREAM_NOT_FOUND);
        return Some(match is_absent {
            true => DiagnosticFinding::ok(format!("the stream {name} does not exist; the first start makes it")),
            false => {
                let text = error.get("description").and_then(Value::as_str).unwrap_or("unknown error");
                DiagnosticFinding::error(format!("the stream {name}: {text}"), "look at the log of nats-server")
            }
        });
    }
    let copies = info["config"]["num_replicas"].as_u64().unwrap_or(1);
    let messages = info["state"]["messages"].as_u64().unwrap_or_default();
    let leader = info["cluster"]["leader"].as_str().unwrap_or_default();
    let behind = info["cluster"]["replicas"].as_array().into_iter().flatten();
    let behind: Vec<_> = behind
        .filter(|copy| copy["offline"].as_bool() == Some(true) || copy["current"].as_bool() == Some(false))
        .filter_map(|copy| copy["name"].as_str())
        .collect();
    if copies > 1 && leader.is_empty() {
        let summary = format!("the stream {name} has no leader: nothing is published");
        return Some(DiagnosticFinding::error(summary, "start the servers that have its copies; a majority is needed"));
    }
    if !behind.is_empty() {
        let summary = format!("the stream {name} has copies that are not current: {}", behind.join(", "));
        return Some(DiagnosticFinding::warning(summary, "start these servers, and wait until they have caught up"));
    }
    if is_clustered && copies == 1 {
        return Some(DiagnosticFinding::warning(
            format!("the stream {name} has one copy on a cluster: it is away while its server is"),
            format!("give it three: `nats stream edit {name} --replicas 3`"),
        ));
    }
    if info["config"]["storage"].as_str() == Some("memory") {
        let summary = format!("the stream {name} is in memory: a restart of its server loses it");
        return Some(DiagnosticFinding::error(
            summary,
            "delete the stream; the next start of the service makes it on disk",
        ));
    }
    Some(DiagnosticFinding::ok(format!("the stream {name}: {messages} messages, copies: {copies}")))
}

/// A stream's description has the server's time.
fn offset(info: &Value, within: Duration) -> Option<ClockOffset> {
    let time: DateTime<Utc> = info["ts"].as_str()?.parse().ok()?;
    Some(ClockOffset { ahead: Utc::now() - within - time, within })
}

fn judge_permissions(user: &str, errors: &ServerErrors) -> DiagnosticFinding {
    let refused = errors.received();
    if refused.is_empty() {
        return DiagnosticFinding::ok(format!("the user {user} may subscribe to what its roles need"));
    }
    let shown = refused.iter().take(5).map(String::as_str).collect::<Vec<_>>().join("; ");
    DiagnosticFinding::error(format!("NATS refuses the user {user}: {shown}"), PERMISSIONS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use telemetry::diagnosis::DiagnosticLevel::{Error, Ok, Warning};

    fn stream(info: Value, is_clustered: bool) -> DiagnosticFinding {
        judge_stream("NODES", &Answer::Json(info), is_clustered).unwrap()
    }

    #[test]
    fn account_without_jetstream_or_room_is_named() {
        assert_eq!(judge_account(&Answer::NoResponders).level, Error);
        assert_eq!(judge_account(&Answer::Json(json!({ "error": { "code": 503 } }))).level, Error);
        assert_eq!(judge_account(&Answer::Silence("timed out".to_owned())).level, Warning);
        let account = |storage: u64, limits: Value| {
            judge_account(&Answer::Json(json!({ "storage": storage, "memory": 0, "limits": limits })))
        };
        assert_eq!(account(5, json!({ "max_storage": -1, "max_memory": -1, "max_streams": -1 })).level, Ok);
        assert_eq!(account(95, json!({ "max_storage": 100 })).level, Warning);
        assert_eq!(account(0, json!({ "max_storage": 0 })).level, Error);
        assert_eq!(account(0, json!({ "max_storage": 100, "max_streams": 3 })).level, Error);
    }

    #[test]
    fn stream_is_judged_by_its_copies() {
        let one = json!({ "config": { "num_replicas": 1, "storage": "file" }, "state": { "messages": 7 } });
        assert_eq!(stream(one.clone(), false).level, Ok);
        assert_eq!(stream(one, true).level, Warning);
        let three = |cluster: Value| stream(json!({ "config": { "num_replicas": 3 }, "cluster": cluster }), true);
        assert_eq!(three(json!({ "leader": "a", "replicas": [{ "name": "b", "current": true }] })).level, Ok);
        let behind = three(json!({ "leader": "a", "replicas": [{ "name": "b", "current": true, "offline": true }] }));
        assert!(behind.level == Warning && behind.summary.ends_with("not current: b"), "{behind:?}");
        assert_eq!(three(json!({ "replicas": [] })).level, Error);
        assert_eq!(stream(json!({ "error": { "err_code": 10059 } }), false).level, Ok);
        assert_eq!(stream(json!({ "error": { "err_code": 10008, "description": "no quorum" } }), false).level, Error);
        assert_eq!(stream(json!({ "config": { "storage": "memory" } }), false).level, Error);
    }

    #[test]
    fn server_time_of_a_stream_is_compared_with_the_clock() {
        let offset = |time: &str| offset(&json!({ "ts": time }), Duration::ZERO);
        assert!(offset("2001-01-01T00:00:00Z").unwrap().exceeds_tolerance());
        assert!(!offset(&Utc::now().to_rfc3339()).unwrap().exceeds_tolerance());
        assert_eq!(offset("yesterday"), None);
    }

    #[test]
    fn refused_connection_says_which_setting_is_wrong() {
        assert!(judge_connection("authorization violation").action.unwrap().contains("password"));
        assert!(judge_connection("TLS error: invalid peer certificate").action.unwrap().contains("SVC_NATS_CA_PATH"));
        assert!(judge_connection("IO error: connection refused").action.unwrap().contains("start NATS"));
    }
}
