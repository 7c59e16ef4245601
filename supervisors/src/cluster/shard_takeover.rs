//! Reconciles this member's shards with the assignment: takes over shards without a living owner, hands over those that are assigned to
//! others, drops those that were taken over.

use super::bus::Bus;
use super::failure_detector::{ConnectivityGraph, PartitionDetector, is_partitioned};
use super::heartbeat::RECEIVED_MEMBERS;
use super::parked_marks::park_marked;
use super::shard_assignment::assign;
use super::{ClusterView, RECENT_HEARTBEAT, has_role};
use crate::process_roles::ProcessRole;
use actors::sharding::shard_of;
use actors::shell_dependencies::Term;
use actors::{Directory, Host};
use domain::commit::Epoch;
use domain::{MemberId, Shard};
use futures::StreamExt;
use persistence::Cluster;
use persistence::membership::{Member, MemberHeartbeat, Ownership};
use persistence::outage_log::OutageLog;
use ractor::ActorCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// How often the ownership table is read in full; a message over NATS makes it sooner.
const RECONCILE_INTERVAL: Duration = Duration::from_millis(500);

/// How often the marks of parked entities are read; a message over NATS makes it sooner.
const MARKS_INTERVAL: Duration = Duration::from_secs(60);

/// How long commands in flight may take before their shard is closed.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Shards that are handed over in one round: each is closed for a moment, and not all should be at once.
const HANDOVERS_AT_ONCE: usize = 64;

/// Owns, takes over and hands over the shards of this member.
pub struct ShardReconciler {
    pub(super) view: Arc<ClusterView>,
    pub(super) cluster: Cluster,
    host: Arc<Host>,
    directory: Directory,
    pub(super) bus: Bus,
    /// The parent of the shards' supervisors. `None` in a process without entities: it reads the ownership and owns nothing.
    parent: Option<ActorCell>,
    serving: Mutex<BTreeMap<Shard, CancellationToken>>,
    pub(super) reconcile_now: Arc<Notify>,
    /// Another member may have parked an entity of this member's shards.
    read_marks: AtomicBool,
    partition_detector: Mutex<PartitionDetector>,
    pub(super) began: Instant,
}

impl ShardReconciler {
    #[must_use]
    pub fn new(
        view: Arc<ClusterView>,
        cluster: Cluster,
        host: Arc<Host>,
        directory: Directory,
        bus: Bus,
        parent: Option<ActorCell>,
        reconcile_now: Arc<Notify>,
    ) -> Self {
        Self {
            view,
            cluster,
            host,
            directory,
            bus,
            parent,
            serving: Mutex::default(),
            reconcile_now,
            read_marks: AtomicBool::default(),
            partition_detector: Mutex::default(),
            began: Instant::now(),
        }
    }

    /// Receives the others' messages over NATS.
    ///
    /// # Errors
    /// Where the subscription ends.
    pub async fn run_listener(&self) -> anyhow::Result<()> {
        let messages = self.bus.broadcasts("gpuaas.cluster.*").await?;
        let cells = self.bus.rate_cells_for(self.view.me.id).await?;
        let mut messages = futures::stream::select(messages, cells);
        while let Some((sender, message)) = messages.next().await {
            match message.subject.as_str() {
                "gpuaas.cluster.beat" => {
                    let named = uuid::Uuid::from_slice(&message.payload).ok().map(MemberId);
                    // No member sends a heartbeat for another.
                    if let Some(member) = named.filter(|named| sender.is_none_or(|sender| sender == *named)) {
                        self.view.change_state(|state| {
                            state.last_message_at.insert(member, Instant::now());
                        });
                    }
                }
                "gpuaas.cluster.changed" => {
                    self.read_marks.store(true, Ordering::Relaxed);
                    self.reconcile_now.notify_one();
                }
                subject if subject.starts_with("gpuaas.cells.") => self.directory.import_rate_cells(&message.payload),
                _ => {}
            }
        }
        anyhow::bail!("the subscription ended")
    }

    /// Reconciles the shards, periodically.
    ///
    /// # Errors
    /// Never; what fails is retried in the next round.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut outage = OutageLog::new();
        let mut marks_due_at = Instant::now() + MARKS_INTERVAL;
        loop {
            // The message of a mark may be lost.
            if Instant::now() >= marks_due_at {
                marks_due_at = Instant::now() + MARKS_INTERVAL;
                self.read_marks.store(true, Ordering::Relaxed);
            }
            match self.reconcile().await {
                Ok(()) => {
                    let _ = outage.ended(Instant::now());
                }
                Err(error) => {
                    if let Some(failures) = outage.failed(Instant::now()) {
                        tracing::warn!(error = format!("{error:#}"), failures, "could not claim or renew shards");
                    }
                }
            }
            let _ = tokio::time::timeout(RECONCILE_INTERVAL, self.reconcile_now.notified()).await;
        }
    }

    async fn reconcile(&self) -> anyhow::Result<()> {
        // The shards first: the row of a member that owns a shard by then was written before, and is read afterwards.
        let renewal = self.view.state().renewed_after_lapse;
        let shards = self.cluster.shards().await?;
        // With the lists of received members the rows of all grow with the square of the members: owners of shards alone need them.
        let members = match self.parent {
            Some(_) => self.cluster.members().await?,
            None => self.cluster.members_without(RECEIVED_MEMBERS).await?,
        };
        let now = Instant::now();
        let living = self.view.update(members, &shards, now);
        self.bus.compact();
        if self.parent.is_none() {
            renewal.into_iter().for_each(|renewal| self.view.confirm_renewal(renewal));
            return Ok(());
        }
        self.update_partition_status(&living, now);
        self.apply_ownership(&shards).await?;
        if self.read_marks.swap(false, Ordering::Relaxed)
            && let Err(error) = park_marked(&self.cluster, &self.host).await
        {
            self.read_marks.store(true, Ordering::Relaxed);
            tracing::debug!(%error, "could not read which entities are parked; the next round reads them");
        }
        if let Some(renewal) = renewal {
            self.view.confirm_renewal(renewal);
            // Commands for this member's shards are received from here on.
            self.apply_ownership(&shards).await?;
        }
        let me = self.view.me.id;
        if !living.iter().any(|heartbeat| heartbeat.member.id == me) {
            // The others do not know this member yet.
            return Ok(());
        }
        let wanted = assign(&eligible_owners(&living));
        let state = self.view.state();
        let unowned = |owned: &&Ownership| {
            let dead = |owner| state.heartbeat_expired(owner, now) && state.may_take_over_from(owner, now);
            wanted.get(&owned.shard) == Some(&me) && owned.owner.is_none_or(dead)
        };
        let free: Vec<_> = shards.iter().filter(unowned).copied().collect();
        if !free.is_empty() {
            let watched = state.heartbeats.iter().map(|(id, beat)| (*id, beat.at)).collect();
            let won = self.cluster.take_over(me, &free, &watched).await?;
            if !won.is_empty() {
                tracing::info!(shards = won.len(), "took shards over");
                self.open(won).await?;
                self.bus.ownership_changed().await;
            }
        }
        let has_recent_heartbeat =
            |to: &MemberId| living.iter().any(|it| it.member.id == *to && it.silent_for <= RECENT_HEARTBEAT);
        self.rebalance(&shards, &wanted, has_recent_heartbeat).await
    }

    /// Withdraws this member while it is partitioned from others that receive each other. They read so in its next heartbeat; only what is
    /// committed in Postgres is acted on.
    fn update_partition_status(&self, living: &[MemberHeartbeat], now: Instant) {
        let observed = is_partitioned(self.view.me.id, &connectivity(living));
        let partitioned = self.partition_detector.lock().unwrap_or_else(PoisonError::into_inner).observe(observed, now);
        if partitioned != self.view.state().partitioned {
            self.view.change_state(|state| state.partitioned = partitioned);
            if partitioned {
                tracing::warn!(
                    "the other members receive each other over NATS and not this one: it hands its shards over"
                );
            } else {
                tracing::info!("the other members receive this one again");
            }
        }
    }

    /// Applies the ownership table to this member: opens owned shards that are not open, drops open shards that are not owned.
    async fn apply_ownership(&self, shards: &[Ownership]) -> anyhow::Result<()> {
        let me = self.view.me.id;
        let mut to_open = BTreeMap::new();
        for owned in shards {
            let here = self.host.term(owned.shard);
            match (owned.owner == Some(me), here) {
                (true, Some(term)) if term.epoch == owned.epoch => self.serve(owned.shard),
                (true, _) => {
                    to_open.insert(owned.shard, owned.epoch);
                }
                (false, Some(term)) if term.epoch < owned.epoch => {
                    tracing::info!(shard = %owned.shard, "another member took the shard");
                    self.stop_serving(owned.shard);
                    self.host.lose(owned.shard);
                    self.directory.remove_quotas(&[owned.shard].into());
                }
                // The read is older than this member's own takeover.
                (false, Some(_) | None) => {}
            }
        }
        self.open(to_open).await
    }

    async fn open(&self, shards: BTreeMap<Shard, Epoch>) -> anyhow::Result<()> {
        if shards.is_empty() {
            return Ok(());
        }
        let parked = self.cluster.parked(&shards.keys().copied().collect::<Vec<_>>()).await.unwrap_or_else(|error| {
            // An entity that cannot be activated is parked again when it gets a command.
            tracing::warn!(error = %error, "could not read which entities are parked");
            Vec::new()
        });
        for (shard, epoch) in shards {
            self.host.open(Term { shard, epoch }, self.parent.clone()).await?;
            for (entity, reason) in parked.iter().filter(|(entity, _)| shard_of(entity.id) == shard) {
                self.host.restore_parked(*entity, reason.clone());
            }
            self.serve(shard);
        }
        Ok(())
    }

    /// Subscribes to commands for the shard, where it has not yet.
    fn serve(&self, shard: Shard) {
        if !self.view.has_fresh_lease() {
            return;
        }
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        // A subscription that has ended by itself receives nothing any more.
        if serving.get(&shard).is_none_or(CancellationToken::is_cancelled) {
            let until = CancellationToken::new();
            self.bus.serve_shard(shard, self.directory.clone(), until.clone());
            serving.insert(shard, until);
        }
    }

    /// Ends all subscriptions: this member may no longer answer from its memory, and another may own its shards by now.
    pub(super) fn stop_serving_all(&self) {
        let serving = std::mem::take(&mut *self.serving.lock().unwrap_or_else(PoisonError::into_inner));
        for until in serving.into_values() {
            until.cancel();
        }
    }

    /// Hands over shards that are assigned to another living member: closed, drained, the epoch raised.
    async fn rebalance(
        &self,
        shards: &[Ownership],
        wanted: &BTreeMap<Shard, MemberId>,
        has_recent_heartbeat: impl Fn(&MemberId) -> bool,
    ) -> anyhow::Result<()> {
        let me = self.view.me.id;
        let handovers = shards.iter().filter(|owned| owned.owner == Some(me));
        let handovers = handovers.filter_map(|owned| wanted.get(&owned.shard).map(|to| (owned.shard, *to)));
        let handovers: Vec<_> =
            handovers.filter(|(_, to)| *to != me && has_recent_heartbeat(to)).take(HANDOVERS_AT_ONCE).collect();
        self.handover(&handovers.iter().map(|(shard, to)| (*shard, Some(*to))).collect::<Vec<_>>()).await?;
        if !handovers.is_empty() {
            tracing::info!(shards = handovers.len(), "handed shards over");
            self.bus.ownership_changed().await;
        }
        Ok(())
    }

    /// Closes these shards at once, each drained, and raises their epochs in favour of their new owners.
    async fn handover(&self, handovers: &[(Shard, Option<MemberId>)]) -> anyhow::Result<()> {
        let terms = handovers.iter().filter_map(|(shard, to)| self.host.term(*shard).map(|term| (term, *to)));
        let terms: Vec<_> = terms.collect();
        let closing = terms.iter().map(|(term, _)| {
            self.stop_serving(term.shard);
            self.host.close(term.shard, DRAIN_TIMEOUT)
        });
        futures::future::join_all(closing).await;
        let mut by_heir: BTreeMap<Option<MemberId>, Vec<(Shard, Epoch)>> = BTreeMap::new();
        for (term, to) in terms {
            by_heir.entry(to).or_default().push((term.shard, term.epoch));
        }
        for (to, shards) in by_heir {
            let handovers = shards.iter().map(|(shard, _)| *shard).collect();
            // Sent before the new owner can know of its ownership; lost where it cannot be sent, since it is not worth waiting for.
            if let Some(heir) = to {
                for cells in self.directory.export_rate_cells(&handovers) {
                    self.bus.send_rate_cells(heir, cells).await;
                }
            }
            self.cluster.handover(self.view.me.id, to, &shards).await?;
            self.directory.remove_quotas(&handovers);
        }
        Ok(())
    }

    fn stop_serving(&self, shard: Shard) {
        if let Some(until) = self.serving.lock().unwrap_or_else(PoisonError::into_inner).remove(&shard) {
            until.cancel();
        }
    }

    /// The ordered shutdown: the others learn that this member leaves, every shard is handed over to its next owner, and the member's row
    /// is removed. Heartbeats and takeovers must have ended.
    pub async fn leave(&self) {
        if let Err(error) = self.leave_in_order().await {
            tracing::warn!(error = %error, "some shards could not be handed over; other members take them over");
        }
    }

    async fn leave_in_order(&self) -> anyhow::Result<()> {
        let me = self.view.me.id;
        let mut leaving = self.current_member();
        leaving.details["roles"] = serde_json::Value::Array(Vec::new());
        self.cluster.heartbeat(&leaving).await?;
        let wanted = assign(&eligible_owners(&self.cluster.alive(RECENT_HEARTBEAT).await?));
        let handovers: Vec<_> =
            self.host.terms().iter().map(|term| (term.shard, wanted.get(&term.shard).copied())).collect();
        for some in handovers.chunks(HANDOVERS_AT_ONCE) {
            self.handover(some).await?;
            self.bus.ownership_changed().await;
        }
        Ok(self.cluster.remove(me).await?)
    }
}

/// The members that are eligible to own shards: those that run entities, without those that withdraw themselves, as long as others
/// are left.
fn eligible_owners(living: &[MemberHeartbeat]) -> Vec<MemberId> {
    let able = || living.iter().map(|heartbeat| &heartbeat.member).filter(|member| runs_entities(member));
    let reached: Vec<_> = able().filter(|member| member.details["cut_off"] != true).map(|member| member.id).collect();
    if reached.is_empty() { able().map(|member| member.id).collect() } else { reached }
}

/// Whether a member runs entities, by its own row.
fn runs_entities(member: &Member) -> bool {
    has_role(member, ProcessRole::Entities)
}

/// The members that each member receives, as far as its row says so.
fn connectivity(living: &[MemberHeartbeat]) -> ConnectivityGraph {
    let received = |heartbeat: &MemberHeartbeat| {
        let received = strict_json::from_value(heartbeat.member.details[RECEIVED_MEMBERS].clone()).ok()?;
        Some((heartbeat.member.id, received))
    };
    living.iter().filter_map(received).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::time::Duration;
    use uuid::Uuid;

    fn member(n: u128, details: Value) -> MemberHeartbeat {
        let started_at = domain::Timestamp::UNIX_EPOCH;
        let member = Member { id: MemberId(Uuid::from_u128(n)), name: n.to_string(), started_at, details };
        MemberHeartbeat { member, heartbeat_at: started_at, silent_for: Duration::ZERO }
    }

    fn numbers(ids: Vec<MemberId>) -> Vec<u128> {
        ids.into_iter().map(|id| id.0.as_u128()).collect()
    }

    #[test]
    fn withdrawn_member_owns_nothing_while_others_are_left() {
        let entities = |cut_off: bool| json!({ "roles": ["entities"], "cut_off": cut_off });
        let living = [member(1, entities(false)), member(2, entities(true)), member(3, json!({ "roles": ["api"] }))];
        assert_eq!(numbers(eligible_owners(&living)), [1]);
        assert_eq!(numbers(eligible_owners(&living[1..])), [2]);
        let of_an_earlier_release = member(4, json!({ "roles": ["entities"] }));
        assert_eq!(numbers(eligible_owners(&[of_an_earlier_release])), [4]);
    }

    #[test]
    fn received_members_are_parsed_and_a_missing_list_is_no_statement() {
        let ids = [Uuid::from_u128(1), Uuid::from_u128(2)];
        let living = [member(1, json!({ "hears": ids })), member(2, json!({})), member(3, json!({ "hears": 7 }))];
        let received = connectivity(&living);
        assert_eq!(received.len(), 1);
        assert_eq!(received[&MemberId(ids[0])].len(), 2);
    }
}
