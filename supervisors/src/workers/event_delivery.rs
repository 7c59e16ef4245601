//! What the reaction to an event works with: the event as it was delivered, the commands that it sends, and what becomes of the event.

use actors::{AskError, AskResult, CommandContext, CommandKey, Directory};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::billing_account::{BillingAccount, Instruction};
use domain::state_machine::{Command as _, RequestOrigin};
use domain::{Action, BillingAccountId, Event, EventId, Machine, Permit, Principal};
use persistence::{Outbox, Reads};

/// The timeout of an event's command. An event that times out is delivered again; one that is waited for blocks others.
const COMMAND_TIMEOUT: TimeDelta = TimeDelta::seconds(2);

/// How long the owner of a shard is searched for. During a takeover there is none for seconds, and other shards' events must proceed.
const OWNER_SEARCH_TIMEOUT: TimeDelta = TimeDelta::milliseconds(200);

/// An event as its consumer receives it.
#[derive(Clone, Debug)]
pub struct EventDelivery {
    pub id: EventId,
    pub event: Event,
    pub origin: RequestOrigin,
}

/// What becomes of a delivered event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Its reaction is committed, or there is none: the outbox row is deleted.
    Settled,
    /// The reaction is not committed yet; the event stays in the outbox and is retried.
    Later { why: String },
}

/// The entities and rows that a reaction reads and changes.
#[derive(Clone)]
pub struct ReactionContext {
    pub(super) directory: Directory,
    pub(super) reads: Reads,
    outbox: Outbox,
    pub(super) permit: Permit,
}

impl ReactionContext {
    /// # Errors
    /// Never in practice: a worker may advance the machines.
    pub fn new(directory: &Directory, reads: Reads, outbox: Outbox, worker: &str) -> anyhow::Result<Self> {
        let permit = authorize(&Principal::system(worker), Action::Advance)?;
        Ok(Self { directory: directory.with_owner_timeout(OWNER_SEARCH_TIMEOUT), reads, outbox, permit })
    }

    /// Sends the one command of the reaction; its commit deletes the outbox row.
    pub(super) async fn send_command<M: Machine>(
        &self,
        delivery: &EventDelivery,
        id: uuid::Uuid,
        command: impl Into<M::Command>,
    ) -> Disposition {
        self.conclude::<M>(delivery, self.ask::<M>(delivery, id, command.into()).await).await
    }

    /// The same to a billing account. What the ledger has already is not posted again where the account has forgotten it: the answer of the
    /// first posting is an event of its own (`deploy/decisions/0097`).
    pub(super) async fn instruct_account(
        &self,
        delivery: &EventDelivery,
        account: BillingAccountId,
        instruction: Instruction,
    ) -> Disposition {
        let posting = instruction.posting();
        let answer = self.ask::<BillingAccount>(delivery, account.0, instruction.into()).await;
        let is_refused_by_ledger = matches!(answer, Err(AskError::Taken { .. }));
        let Some((kind, reference)) = posting.filter(|_| is_refused_by_ledger) else {
            return self.conclude::<BillingAccount>(delivery, answer).await;
        };
        match self.reads.has_posting(account, kind, &reference).await {
            Ok(true) => {
                tracing::info!(reference, "the ledger has the posting already: nothing follows from the event");
                self.settle(delivery).await
            }
            // Another account has it: an operator has to look at the ledger.
            Ok(false) => self.conclude::<BillingAccount>(delivery, answer).await,
            Err(error) => Disposition::Later { why: error.to_string() },
        }
    }

    async fn ask<M: Machine>(&self, delivery: &EventDelivery, id: uuid::Uuid, command: M::Command) -> AskResult<M> {
        let context = self.context_for(delivery).with_key(CommandKey::for_event(delivery.id, command.name()));
        self.directory.ask::<M>(&self.permit, id, command, context).await
    }

    async fn conclude<M: Machine>(&self, delivery: &EventDelivery, answer: AskResult<M>) -> Disposition {
        match answer {
            Ok(answered) if answered.written => Disposition::Settled,
            // Applied before, or nothing had to change: nothing else deletes the row.
            Ok(_) | Err(AskError::AlreadyDone) => self.settle(delivery).await,
            Err(AskError::Rejected(rejection)) => {
                tracing::warn!("what follows from the event was refused: {rejection}");
                self.settle(delivery).await
            }
            Err(error) => Disposition::Later { why: error.to_string() },
        }
    }

    pub(super) fn context_for(&self, delivery: &EventDelivery) -> CommandContext {
        CommandContext::from_origin(&self.permit, delivery.origin.clone(), Utc::now() + COMMAND_TIMEOUT)
            // Running sagas come before new requests: they free capacity.
            .urgent()
    }

    pub(super) async fn settle(&self, delivery: &EventDelivery) -> Disposition {
        match self.outbox.settle(&[delivery.id]).await {
            Ok(_) => Disposition::Settled,
            Err(error) => Disposition::Later { why: error.to_string() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actors::shell_dependencies::Store;
    use domain::PaymentId;
    use domain::billing_account::Holder;
    use domain::money::Currency;
    use local_servers::test_database::TestDatabase;
    use std::sync::Arc;
    use test_host::{NoEffects, PgMember, TestHost};
    use uuid::Uuid;

    #[tokio::test]
    async fn deposit_that_the_account_has_forgotten_is_settled_and_posted_once() {
        let db = TestDatabase::fresh().await;
        let member = PgMember::start(&db.pool).await;
        let reads = Reads::new(db.pool.clone());
        let store: Arc<dyn Store> = Arc::new(member.store(&reads));
        let terms: Vec<_> = member.terms().collect();
        member.drop_published();
        let host = TestHost::start(store, terms, Arc::default(), Arc::new(NoEffects)).await;
        let context =
            ReactionContext::new(&host.directory, reads.clone(), Outbox::new(db.pool.clone()), "test").unwrap();
        let (holder, currency) = (Holder::User("ann".into()), Currency::parse("EUR").unwrap());
        let [ann, bob] = [1, 2].map(|n| BillingAccountId(Uuid::from_u128(n)));
        let deposit = async |account, payment: u128| {
            let (payment_id, amount_minor) = (PaymentId(Uuid::from_u128(payment)), 1_000);
            let event =
                Event::PaymentPaid { payment_id, holder: holder.clone(), currency: currency.clone(), amount_minor };
            let origin = RequestOrigin { correlation_id: "test".to_owned(), traceparent: None, tracestate: None };
            let delivery = EventDelivery { id: EventId(Uuid::new_v4()), event, origin };
            let instruction =
                Instruction::Deposit { payment_id, holder: holder.clone(), currency: currency.clone(), amount_minor };
            context.instruct_account(&delivery, account, instruction).await
        };
        host.environment.advance(TimeDelta::hours(-4));
        for payment in 0..60 {
            assert_eq!(deposit(ann, payment).await, Disposition::Settled);
        }
        host.environment.advance(TimeDelta::hours(4));
        assert_eq!(deposit(ann, 60).await, Disposition::Settled);
        assert_eq!(deposit(ann, 0).await, Disposition::Settled, "resent by a payment that was parked meanwhile");
        let balance = host.directory.host().committed_state::<BillingAccount>(ann.0).unwrap().0.balance;
        assert_eq!(balance.minor(), 61_000);
        // No account can have posted what another one has.
        assert!(matches!(deposit(bob, 0).await, Disposition::Later { .. }));
        assert!(reads.verify_ledger().await.unwrap().holds());
    }
}
