//! Queries to all members at once, for an operator's view of the whole cluster from any replica.

use super::ClusterView;
use super::authentication::{MacInput, MessageOrigin, MessagePurpose};
use super::bus::Bus;
use super::command_forwarding::ReceivedRequest;
use async_nats::HeaderMap;
use domain::MemberId;
use futures::StreamExt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long the slowest member is waited for. Members that did not answer are named in the result.
const GATHER_TIMEOUT: Duration = Duration::from_millis(1500);

const SUBJECT: &str = "gpuaas.runtime.ask";

#[derive(Serialize, Deserialize)]
struct MemberAnswer<A> {
    member: MemberId,
    answer: A,
}

/// The answers of the living members, this one included, and the members that did not answer.
pub struct ClusterAnswers<A> {
    pub answers: BTreeMap<MemberId, A>,
    pub silent: Vec<MemberId>,
}

/// Sends `question` to all members; `own` is this member's answer.
pub async fn ask_all<Q: Serialize, A: Serialize + DeserializeOwned>(
    bus: &Bus,
    view: &ClusterView,
    question: &Q,
    own: A,
) -> ClusterAnswers<A> {
    let mut missing: Vec<MemberId> = view.state().living.iter().map(|heartbeat| heartbeat.member.id).collect();
    missing.retain(|id| *id != view.me.id);
    let mut answers = BTreeMap::from([(view.me.id, own)]);
    // Before its first heartbeat a member does not know the shared time, and others would refuse a question to all as stale.
    if !missing.is_empty() && bus.is_connected() && view.clock.shared().is_some() {
        let collected = tokio::time::timeout(GATHER_TIMEOUT, async {
            let inbox = bus.new_inbox();
            let mut replies = bus.client().subscribe(inbox.clone()).await?;
            let payload = serde_json::to_vec(question)?;
            let (mut headers, reply) = (HeaderMap::new(), Some(inbox.as_str()));
            let request = MacInput { purpose: MessagePurpose::Request, subject: SUBJECT, reply, payload: &payload };
            let to = bus.stamp(&request, None, &mut headers).unwrap_or_default();
            bus.client().publish_with_reply_and_headers(SUBJECT, inbox, headers, payload.into()).await?;
            while !missing.is_empty() {
                let Some(reply) = replies.next().await else { break };
                let Some(origin) = bus.authenticate(MessagePurpose::Answer { to }, &reply) else { continue };
                if let Ok(part) = strict_json::tagged::from_slice::<MemberAnswer<A>>(&reply.payload) {
                    // A member may not answer for another.
                    if matches!(origin, MessageOrigin::Stamped(stamp) if stamp.sender != part.member) {
                        continue;
                    }
                    missing.retain(|id| *id != part.member);
                    answers.insert(part.member, part.answer);
                }
            }
            anyhow::Ok(())
        });
        if let Ok(Err(error)) = collected.await {
            tracing::warn!(error = %error, "could not ask the other members");
        }
    }
    ClusterAnswers { answers, silent: missing }
}

/// Answers the others' queries with `answer`.
///
/// # Errors
/// Where the subscription ends.
pub async fn answer_all<Q, A>(bus: &Bus, view: &ClusterView, answer: impl Fn(Q) -> A) -> anyhow::Result<()>
where
    Q: DeserializeOwned,
    A: Serialize,
{
    let mut questions = bus.client().subscribe(SUBJECT).await?;
    while let Some(message) = questions.next().await {
        let Some(origin) = bus.authenticate(MessagePurpose::Request, &message) else { continue };
        let (Some(inbox), Ok(question)) = (message.reply, strict_json::from_slice(&message.payload)) else { continue };
        let part = MemberAnswer { member: view.me.id, answer: answer(question) };
        let Ok(payload) = serde_json::to_vec(&part) else { continue };
        bus.answer(&ReceivedRequest { origin, reply: inbox.to_string(), payload: Vec::new() }, payload).await;
    }
    anyhow::bail!("the subscription ended")
}
