//! Keeps this member's shards as they should be: takes what is nobody's, gives what should be another's, drops what was taken.

use super::assignment::assign;
use super::bus::Bus;
use super::hearing::{HEARD_WITHIN, Hearing, Standing, is_cut_off};
use super::{BEAT, PROMPT, SILENCE, View, has_role, process};
use crate::config::Role;
use actors::place::shard_of;
use actors::ports::Term;
use actors::{Directory, Host};
use domain::commit::Epoch;
use domain::{MemberId, Shard, Timestamp};
use futures::StreamExt;
use persistence::Cluster;
use persistence::cluster::{Heard, Member, Ownership};
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
    standing: Mutex<Standing>,
    began: Instant,
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
            standing: Mutex::default(),
            began: Instant::now(),
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
            // Before its first heartbeat in Postgres nobody believes what it sends to all.
            if self.view.clock.shared().is_some() {
                self.bus.beat(self.view.me.id).await;
            }
            if !self.view.is_fresh() {
                self.stop_serving_all();
            }
            if n % 2 == 0 {
                let before = Instant::now();
                match tokio::time::timeout(SILENCE, self.renew(n == 0)).await {
                    Ok(Ok(postgres)) => {
                        self.view.clock.measure(before, postgres);
                        self.view.clock.warn();
                        // The first time the others know of this member: it can take its share now. Later: they may have taken it.
                        if self.view.renewed(before) {
                            self.look.notify_one();
                        }
                    }
                    Ok(Err(error)) => tracing::warn!(error = %error, "could not renew this member in Postgres"),
                    Err(_) => tracing::warn!("Postgres did not answer a renewal in time"),
                }
            }
        }
        Ok(())
    }

    /// Postgres' time at the renewal.
    async fn renew(&self, first: bool) -> Result<Timestamp, persistence::StoreError> {
        let me = self.as_it_stands();
        if first { self.cluster.join(&me, process::has_ended).await } else { self.cluster.beat(&me).await }
    }

    /// This member, with what the others must know of it: whom it hears over NATS, and whether it counts itself out.
    fn as_it_stands(&self) -> Member {
        let (mut me, seen, now) = (self.view.me.clone(), self.view.seen(), Instant::now());
        // One that has just come has had no time to hear anybody.
        if self.began.elapsed() > HEARD_WITHIN + BEAT {
            let heard: Vec<_> = seen.heard.keys().filter(|id| seen.hears(**id, now)).collect();
            me.details["hears"] = serde_json::json!(heard);
        }
        me.details["cut_off"] = seen.cut_off.into();
        me.details["clock_offset_ms"] = self.view.clock.offset().map(|offset| offset.ahead.num_milliseconds()).into();
        me
    }

    /// Hears the others over NATS.
    ///
    /// # Errors
    /// Where the subscription ends.
    pub async fn listen(&self) -> anyhow::Result<()> {
        let words = self.bus.notices("gpuaas.cluster.*").await?;
        let cells = self.bus.cells_for(self.view.me.id).await?;
        let mut words = futures::stream::select(words, cells);
        while let Some((sender, word)) = words.next().await {
            match word.subject.as_str() {
                "gpuaas.cluster.beat" => {
                    let named = uuid::Uuid::from_slice(&word.payload).ok().map(MemberId);
                    // No member says of another that it lives.
                    if let Some(member) = named.filter(|named| sender.is_none_or(|sender| sender == *named)) {
                        self.view.note(|seen| {
                            seen.heard.insert(member, Instant::now());
                        });
                    }
                }
                "gpuaas.cluster.changed" => self.look.notify_one(),
                subject if subject.starts_with("gpuaas.cells.") => self.directory.go_on_with_cells(&word.payload),
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
        // The shards first: who owns a shard by then had said of itself what is read of it afterwards.
        let renewal = self.view.seen().renewed_after_lapse;
        let shards = self.cluster.shards().await?;
        let members = self.cluster.members().await?;
        let now = Instant::now();
        let living = self.view.learn(members, &shards, now);
        self.bus.shrink();
        if !self.takes_shards {
            renewal.into_iter().for_each(|renewal| self.view.confirm(renewal));
            return Ok(());
        }
        self.take_position(&living, now);
        self.follow(&shards).await?;
        if let Some(renewal) = renewal {
            self.view.confirm(renewal);
            // Commands for what is ours are heard from here on.
            self.follow(&shards).await?;
        }
        let me = self.view.me.id;
        if !living.iter().any(|heard| heard.member.id == me) {
            // The others do not know of this member yet.
            return Ok(());
        }
        let wanted = assign(&owners(&living));
        let seen = self.view.seen();
        let masterless = |owned: &&Ownership| {
            let dead = |owner| seen.has_fallen_silent(owner, now) && seen.may_take_from(owner, now);
            wanted.get(&owned.shard) == Some(&me) && owned.owner.is_none_or(dead)
        };
        let free: Vec<_> = shards.iter().filter(masterless).copied().collect();
        if !free.is_empty() {
            let watched = seen.beats.iter().map(|(id, beat)| (*id, beat.at)).collect();
            let won = self.cluster.take_over(me, &free, &watched).await?;
            if !won.is_empty() {
                tracing::info!(shards = won.len(), "took shards over");
                self.open(won).await?;
                self.bus.ownership_changed().await;
            }
        }
        let prompt = |to: &MemberId| living.iter().any(|it| it.member.id == *to && it.silent_for <= PROMPT);
        self.give(&shards, &wanted, prompt).await
    }

    /// Counts this member out while it is cut off from others that hear each other. They read it with its next beat; only what stands
    /// in the books is acted on.
    fn take_position(&self, living: &[Heard], now: Instant) {
        let seen_cut_off = is_cut_off(self.view.me.id, &hearing(living));
        let cut_off = self.standing.lock().unwrap_or_else(PoisonError::into_inner).look(seen_cut_off, now);
        if cut_off != self.view.seen().cut_off {
            self.view.note(|seen| seen.cut_off = cut_off);
            if cut_off {
                tracing::warn!(
                    "the other members hear each other over NATS and not this one: it hands its shards over"
                );
            } else {
                tracing::info!("the other members hear this one again");
            }
        }
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
                    self.directory.forget_cells(&[owned.shard].into());
                }
                // A read that is older than our own takeover.
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
            // Whoever is asked and cannot be woken is parked again.
            tracing::warn!(error = %error, "could not read which entities are parked");
            Vec::new()
        });
        for (shard, epoch) in shards {
            let parent = self.parent.lock().unwrap_or_else(PoisonError::into_inner).clone();
            self.host.open(Term { shard, epoch }, parent).await?;
            for (entity, reason) in parked.iter().filter(|(entity, _)| shard_of(entity.id) == shard) {
                self.host.keep_parked(*entity, reason.clone());
            }
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
        // One that has ended by itself hears nothing any more.
        if serving.get(&shard).is_none_or(CancellationToken::is_cancelled) {
            let until = CancellationToken::new();
            self.bus.serve_shard(shard, self.directory.clone(), until.clone());
            serving.insert(shard, until);
        }
    }

    /// This member may not answer from its memory any more: another may own its shards by now, and must be the only one heard.
    fn stop_serving_all(&self) {
        let serving = std::mem::take(&mut *self.serving.lock().unwrap_or_else(PoisonError::into_inner));
        for until in serving.into_values() {
            until.cancel();
        }
    }

    /// Hands over what should be another living member's: intake closed, drained, the epoch raised.
    async fn give(
        &self,
        shards: &[Ownership],
        wanted: &BTreeMap<Shard, MemberId>,
        prompt: impl Fn(&MemberId) -> bool,
    ) -> anyhow::Result<()> {
        let me = self.view.me.id;
        let going = shards.iter().filter(|owned| owned.owner == Some(me));
        let going = going.filter_map(|owned| wanted.get(&owned.shard).map(|to| (owned.shard, *to)));
        let going: Vec<_> = going.filter(|(_, to)| *to != me && prompt(to)).take(IN_ONE_TURN).collect();
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
            let going = shards.iter().map(|(shard, _)| *shard).collect();
            // Said before the heir can know that it owns them, and lost where it cannot be said: it is worth no waiting.
            if let Some(heir) = to {
                for cells in self.directory.cells_of(&going) {
                    self.bus.hand_cells(heir, cells).await;
                }
            }
            self.cluster.hand_over(self.view.me.id, to, &shards).await?;
            self.directory.forget_cells(&going);
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
        let mut leaving = self.as_it_stands();
        leaving.details["roles"] = serde_json::Value::Array(Vec::new());
        self.cluster.beat(&leaving).await?;
        let wanted = assign(&owners(&self.cluster.living(PROMPT).await?));
        let going: Vec<_> =
            self.host.terms().iter().map(|term| (term.shard, wanted.get(&term.shard).copied())).collect();
        for some in going.chunks(IN_ONE_TURN) {
            self.hand_over(some).await?;
            self.bus.ownership_changed().await;
        }
        Ok(self.cluster.remove(me).await?)
    }
}

/// The members that should own the shards: those that run entities, without those that count themselves out, as long as others are
/// left.
fn owners(living: &[Heard]) -> Vec<MemberId> {
    let able = || living.iter().map(|heard| &heard.member).filter(|member| runs_entities(member));
    let reached: Vec<_> = able().filter(|member| member.details["cut_off"] != true).map(|member| member.id).collect();
    if reached.is_empty() { able().map(|member| member.id).collect() } else { reached }
}

/// Whether a member runs entities, by what it says of itself.
fn runs_entities(member: &Member) -> bool {
    has_role(member, Role::Entities)
}

/// Whom each member hears, as far as it has said.
fn hearing(living: &[Heard]) -> Hearing {
    let said = |heard: &Heard| {
        let hears = serde_json::from_value(heard.member.details["hears"].clone()).ok()?;
        Some((heard.member.id, hears))
    };
    living.iter().filter_map(said).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::time::Duration;
    use uuid::Uuid;

    fn member(n: u128, details: Value) -> Heard {
        let started_at = domain::Timestamp::UNIX_EPOCH;
        let member = Member { id: MemberId(Uuid::from_u128(n)), name: n.to_string(), started_at, details };
        Heard { member, beat_at: started_at, silent_for: Duration::ZERO }
    }

    fn numbers(ids: Vec<MemberId>) -> Vec<u128> {
        ids.into_iter().map(|id| id.0.as_u128()).collect()
    }

    #[test]
    fn who_counts_itself_out_owns_nothing_as_long_as_others_are_left() {
        let entities = |cut_off: bool| json!({ "roles": ["entities"], "cut_off": cut_off });
        let living = [member(1, entities(false)), member(2, entities(true)), member(3, json!({ "roles": ["api"] }))];
        assert_eq!(numbers(owners(&living)), [1]);
        assert_eq!(numbers(owners(&living[1..])), [2]);
        let of_an_earlier_release = member(4, json!({ "roles": ["entities"] }));
        assert_eq!(numbers(owners(&[of_an_earlier_release])), [4]);
    }

    #[test]
    fn what_a_member_says_of_whom_it_hears_is_read_and_silence_is_no_statement() {
        let ids = [Uuid::from_u128(1), Uuid::from_u128(2)];
        let living = [member(1, json!({ "hears": ids })), member(2, json!({})), member(3, json!({ "hears": 7 }))];
        let said = hearing(&living);
        assert_eq!(said.len(), 1);
        assert_eq!(said[&MemberId(ids[0])].len(), 2);
    }
}
