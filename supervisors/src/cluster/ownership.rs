//! Keeps this member's shards as they should be: takes what is nobody's, gives what should be another's, drops what was taken.

use super::assignment::assign;
use super::bus::Bus;
use super::{BEAT, SILENCE, View};
use actors::ports::Term;
use actors::{Directory, Host};
use domain::commit::Epoch;
use domain::{MemberId, Shard};
use futures::StreamExt;
use persistence::Cluster;
use persistence::cluster::Ownership;
use ractor::ActorCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// How often the books are read in full; a word over NATS makes it sooner.
const TURN: Duration = Duration::from_millis(500);

/// How long commands that are under way get to end before a shard goes.
const GRACE: Duration = Duration::from_secs(2);

/// So many shards go in one turn: each is closed for a moment, and they should not all be at once.
const IN_ONE_TURN: usize = 64;

/// This member's hand in the game.
pub struct Owner {
    pub view: Arc<View>,
    pub cluster: Cluster,
    pub host: Arc<Host>,
    pub directory: Directory,
    pub bus: Bus,
    /// Under whom the shards' supervisors run.
    pub parent: Mutex<Option<ActorCell>>,
    serving: Mutex<BTreeMap<Shard, CancellationToken>>,
    look: Arc<Notify>,
    /// False for a process without entities: it reads along and owns nothing.
    takes_shards: bool,
}

impl Owner {
    #[must_use]
    pub fn new(
        view: Arc<View>,
        cluster: Cluster,
        host: Arc<Host>,
        directory: Directory,
        bus: Bus,
        look: Arc<Notify>,
        takes_shards: bool,
    ) -> Self {
        Self {
            view,
            cluster,
            host,
            directory,
            bus,
            parent: Mutex::default(),
            serving: Mutex::default(),
            look,
            takes_shards,
        }
    }

    /// Beats: every second in Postgres, twice as often over NATS.
    ///
    /// # Errors
    /// Never; it runs until it is dropped.
    pub async fn beat(&self) -> anyhow::Result<()> {
        let mut turn = tokio::time::interval(BEAT / 2);
        turn.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        for n in 0_u64.. {
            turn.tick().await;
            self.bus.beat(self.view.me.id).await;
            if !self.view.is_fresh() {
                self.stop_serving_all();
            }
            if n % 2 == 0 {
                let before = Instant::now();
                match tokio::time::timeout(SILENCE, self.cluster.beat(&self.view.me)).await {
                    Ok(Ok(())) => {
                        // The first time the others know of this member: it can take its share now.
                        if self.view.seen().renewed_at.is_none() {
                            self.look.notify_one();
                        }
                        self.view.note(|seen| seen.renewed_at = Some(before));
                    }
                    Ok(Err(error)) => tracing::warn!(error = %error, "could not renew this member in Postgres"),
                    Err(_) => tracing::warn!("Postgres did not answer a renewal in time"),
                }
            }
        }
        Ok(())
    }

    /// Hears the others over NATS.
    ///
    /// # Errors
    /// Where the subscription ends.
    pub async fn listen(&self) -> anyhow::Result<()> {
        let mut words = self.bus.client().subscribe("gpuaas.cluster.*").await?;
        while let Some(word) = words.next().await {
            match word.subject.as_str() {
                "gpuaas.cluster.beat" => {
                    if let Ok(id) = uuid::Uuid::from_slice(&word.payload) {
                        self.view.note(|seen| {
                            seen.heard.insert(MemberId(id), Instant::now());
                        });
                    }
                }
                "gpuaas.cluster.changed" => self.look.notify_one(),
                _ => {}
            }
        }
        anyhow::bail!("the subscription ended")
    }

    /// Looks at the books, turn by turn.
    ///
    /// # Errors
    /// Never; what fails is tried again at the next turn.
    pub async fn run(&self) -> anyhow::Result<()> {
        loop {
            if let Err(error) = self.turn().await {
                tracing::warn!(error = %error, "could not look after the shards");
            }
            let _ = tokio::time::timeout(TURN, self.look.notified()).await;
        }
    }

    async fn turn(&self) -> anyhow::Result<()> {
        let living = self.cluster.living(SILENCE).await?;
        let shards = self.cluster.shards().await?;
        self.view.note(|seen| {
            seen.heard.retain(|id, _| living.iter().any(|heard| heard.member.id == *id));
            (seen.living, seen.shards) = (living.clone(), shards.clone());
        });
        if !self.takes_shards {
            return Ok(());
        }
        let me = self.view.me.id;
        self.follow(&shards).await?;
        let owners: Vec<_> = living.iter().map(|heard| &heard.member).filter(|member| owns_shards(member)).collect();
        let owners: Vec<_> = owners.into_iter().map(|member| member.id).collect();
        if !owners.contains(&me) {
            // The others do not know of this member yet.
            return Ok(());
        }
        let wanted = assign(&owners);
        let masterless = |owned: &&Ownership| {
            wanted.get(&owned.shard) == Some(&me) && owned.owner.is_none_or(|owner| !owners.contains(&owner))
        };
        let free: Vec<_> = shards.iter().filter(masterless).copied().collect();
        if !free.is_empty() {
            let won = self.cluster.take_over(me, &free, SILENCE).await?;
            if !won.is_empty() {
                tracing::info!(shards = won.len(), "took shards over");
                self.open(won).await?;
                self.bus.ownership_changed().await;
            }
        }
        self.give(&shards, &wanted).await
    }

    /// What the books say of this member is so: opens what is ours and not open, drops what is open and not ours.
    async fn follow(&self, shards: &[Ownership]) -> anyhow::Result<()> {
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
                }
                // A read that is older than our own takeover.
                (false, Some(_) | None) => {}
            }
        }
        self.open(to_open).await
    }

    async fn open(&self, shards: BTreeMap<Shard, Epoch>) -> anyhow::Result<()> {
        for (shard, epoch) in shards {
            let parent = self.parent.lock().unwrap_or_else(PoisonError::into_inner).clone();
            self.host.open(Term { shard, epoch }, parent).await?;
            self.serve(shard);
        }
        Ok(())
    }

    /// Hears commands for the shard, if it does not yet.
    fn serve(&self, shard: Shard) {
        if !self.view.is_fresh() {
            return;
        }
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        serving.entry(shard).or_insert_with(|| {
            let until = CancellationToken::new();
            self.bus.serve_shard(shard, self.directory.clone(), until.clone());
            until
        });
    }

    /// This member may not answer from its memory any more: another may own its shards by now, and must be the only one heard.
    fn stop_serving_all(&self) {
        let serving = std::mem::take(&mut *self.serving.lock().unwrap_or_else(PoisonError::into_inner));
        for until in serving.into_values() {
            until.cancel();
        }
    }

    /// Hands over what should be another living member's: intake closed, drained, the epoch raised.
    async fn give(&self, shards: &[Ownership], wanted: &BTreeMap<Shard, MemberId>) -> anyhow::Result<()> {
        let me = self.view.me.id;
        let going = shards.iter().filter(|owned| owned.owner == Some(me));
        let going = going.filter_map(|owned| wanted.get(&owned.shard).map(|to| (owned.shard, *to)));
        let going: Vec<_> = going.filter(|(_, to)| *to != me).take(IN_ONE_TURN).collect();
        self.hand_over(&going.iter().map(|(shard, to)| (*shard, Some(*to))).collect::<Vec<_>>()).await?;
        if !going.is_empty() {
            tracing::info!(shards = going.len(), "handed shards over");
            self.bus.ownership_changed().await;
        }
        Ok(())
    }

    /// Closes these shards at once, each drained, and raises their epochs in favour of their new owners.
    async fn hand_over(&self, going: &[(Shard, Option<MemberId>)]) -> anyhow::Result<()> {
        let terms = going.iter().filter_map(|(shard, to)| self.host.term(*shard).map(|term| (term, *to)));
        let terms: Vec<_> = terms.collect();
        let closing = terms.iter().map(|(term, _)| {
            self.stop_serving(term.shard);
            self.host.close(term.shard, GRACE)
        });
        futures::future::join_all(closing).await;
        let mut by_heir: BTreeMap<Option<MemberId>, Vec<(Shard, Epoch)>> = BTreeMap::new();
        for (term, to) in terms {
            by_heir.entry(to).or_default().push((term.shard, term.epoch));
        }
        for (to, shards) in by_heir {
            self.cluster.hand_over(self.view.me.id, to, &shards).await?;
        }
        Ok(())
    }

    fn stop_serving(&self, shard: Shard) {
        if let Some(until) = self.serving.lock().unwrap_or_else(PoisonError::into_inner).remove(&shard) {
            until.cancel();
        }
    }

    /// The ordered end: the others hear that they are to do without this member, every shard goes to whom it belongs then, and the
    /// member is forgotten. It must not beat or take shards any more.
    pub async fn leave(&self) {
        if let Err(error) = self.leave_in_order().await {
            tracing::warn!(error = %error, "could not hand everything over; the others take it in a moment");
        }
    }

    async fn leave_in_order(&self) -> anyhow::Result<()> {
        let me = self.view.me.id;
        let mut leaving = self.view.me.clone();
        leaving.details["roles"] = serde_json::Value::Array(Vec::new());
        self.cluster.beat(&leaving).await?;
        let living = self.cluster.living(SILENCE).await?;
        let others: Vec<_> = living.iter().map(|heard| &heard.member).filter(|member| owns_shards(member)).collect();
        let wanted = assign(&others.iter().map(|member| member.id).collect::<Vec<_>>());
        let going: Vec<_> =
            self.host.terms().iter().map(|term| (term.shard, wanted.get(&term.shard).copied())).collect();
        for some in going.chunks(IN_ONE_TURN) {
            self.hand_over(some).await?;
            self.bus.ownership_changed().await;
        }
        Ok(self.cluster.remove(me).await?)
    }
}

/// Whether a member runs entities, by what it says of itself.
fn owns_shards(member: &persistence::cluster::Member) -> bool {
    member.details["roles"].as_array().is_some_and(|roles| roles.iter().any(|role| role == "entities"))
}
