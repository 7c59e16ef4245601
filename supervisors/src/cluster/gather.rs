//! Questions to every member at once, for what an operator wants to see of the whole cluster from any replica.

use super::View;
use super::authentication::{Believed, Message, Purpose};
use super::bus::Bus;
use super::requests::Received;
use async_nats::HeaderMap;
use domain::MemberId;
use futures::StreamExt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long the slowest member is waited for. Who is silent is named in the answer.
const PATIENCE: Duration = Duration::from_millis(1500);

const SUBJECT: &str = "gpuaas.runtime.ask";

#[derive(Serialize, Deserialize)]
struct Part<A> {
    member: MemberId,
    answer: A,
}

/// What each living member answered, this one included, and who did not.
pub struct Gathered<A> {
    pub answers: BTreeMap<MemberId, A>,
    pub silent: Vec<MemberId>,
}

/// Asks all members `question`; `own` is this member's answer.
pub async fn ask_all<Q: Serialize, A: Serialize + DeserializeOwned>(
    bus: &Bus,
    view: &View,
    question: &Q,
    own: A,
) -> Gathered<A> {
    let mut missing: Vec<MemberId> = view.seen().living.iter().map(|heard| heard.member.id).collect();
    missing.retain(|id| *id != view.me.id);
    let mut answers = BTreeMap::from([(view.me.id, own)]);
    if !missing.is_empty() && bus.is_connected() {
        let collected = tokio::time::timeout(PATIENCE, async {
            let inbox = bus.new_inbox();
            let mut replies = bus.client().subscribe(inbox.clone()).await?;
            let payload = serde_json::to_vec(question)?;
            let (mut headers, reply) = (HeaderMap::new(), Some(inbox.as_str()));
            let asked = Message { purpose: Purpose::Request, subject: SUBJECT, reply, payload: &payload };
            let to = bus.stamp(&asked, None, &mut headers).unwrap_or_default();
            bus.client().publish_with_reply_and_headers(SUBJECT, inbox, headers, payload.into()).await?;
            while !missing.is_empty() {
                let Some(reply) = replies.next().await else { break };
                let Some(believed) = bus.believed(Purpose::Answer { to }, &reply) else { continue };
                if let Ok(part) = serde_json::from_slice::<Part<A>>(&reply.payload) {
                    // No member answers for another.
                    if matches!(believed, Believed::Stamped(stamp) if stamp.sender != part.member) {
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
    Gathered { answers, silent: missing }
}

/// Answers the others' questions with `answer`.
///
/// # Errors
/// Where the subscription ends.
pub async fn answer_all<Q, A>(bus: &Bus, view: &View, answer: impl Fn(Q) -> A) -> anyhow::Result<()>
where
    Q: DeserializeOwned,
    A: Serialize,
{
    let mut questions = bus.client().subscribe(SUBJECT).await?;
    while let Some(message) = questions.next().await {
        let Some(believed) = bus.believed(Purpose::Request, &message) else { continue };
        let (Some(inbox), Ok(question)) = (message.reply, serde_json::from_slice(&message.payload)) else { continue };
        let part = Part { member: view.me.id, answer: answer(question) };
        let Ok(payload) = serde_json::to_vec(&part) else { continue };
        bus.answer(&Received { believed, reply: inbox.to_string(), payload: Vec::new() }, payload).await;
    }
    anyhow::bail!("the subscription ended")
}
