//! Questions to every member at once, for what an operator wants to see of the whole cluster from any replica.

use super::View;
use super::bus::Bus;
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
            let inbox = bus.client().new_inbox();
            let mut replies = bus.client().subscribe(inbox.clone()).await?;
            let payload = serde_json::to_vec(question)?;
            bus.client().publish_with_reply(SUBJECT, inbox, payload.into()).await?;
            while !missing.is_empty() {
                let Some(reply) = replies.next().await else { break };
                if let Ok(part) = serde_json::from_slice::<Part<A>>(&reply.payload) {
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
        let (Some(inbox), Ok(question)) = (message.reply, serde_json::from_slice(&message.payload)) else { continue };
        let part = Part { member: view.me.id, answer: answer(question) };
        let Ok(payload) = serde_json::to_vec(&part) else { continue };
        if let Err(error) = bus.client().publish(inbox, payload.into()).await {
            tracing::warn!(%error, "an answer could not be sent");
        }
    }
    anyhow::bail!("the subscription ended")
}
