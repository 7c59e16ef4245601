//! What replicas have a browser session do: for the requests of its browser, and after the answers of the identity provider.

use super::{
    BrowserSession, EndReason, REFRESH_LEASE, REFRESH_NOTICE, REFRESH_PAUSE, RefreshState, Rejection, Reply, limits,
};
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};

/// What replicas have a browser session do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Instruction {
    /// Counts it as used: its browser sent a request.
    Touch,
    /// Ends it: its browser logs out.
    LogOut,
    /// Ends it: its user logs in above the limit.
    Displace,
    /// Leases the refresh to a replica that needs another access token than the one that ends at this time.
    BeginRefresh { token_ends_at: Timestamp },
    /// Stores the tokens that the provider issued in the refresh of that number.
    FinishRefresh { attempt: u32, tokens_enc: String, token_ends_at: Timestamp },
    /// Ends the lease: the provider did not answer.
    FailRefresh { attempt: u32 },
    /// Ends the session: the provider refused the refresh.
    RefuseRefresh { attempt: u32, error: String },
    /// Ends it: the provider logged out the user of tokens that were issued until `issued_at`, by the provider's clock. Its name between
    /// members is that of earlier releases.
    #[serde(rename = "provider_logout")]
    #[strum(serialize = "provider_logout")]
    EndByProvider { token_sha256: String, issued_at: Timestamp },
}

impl BrowserSession {
    pub(super) fn follow(
        &self,
        instruction: Instruction,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match instruction {
            Instruction::Touch => Ok(self.active()?.touch(ctx)),
            Instruction::LogOut => Ok(self.end(EndReason::LoggedOut, ctx)),
            Instruction::Displace => Ok(self.end(EndReason::Displaced, ctx)),
            Instruction::BeginRefresh { token_ends_at } => Ok(self.active()?.begin_refresh(token_ends_at, ctx)),
            Instruction::FinishRefresh { attempt, tokens_enc, token_ends_at } => {
                Ok(self.active()?.finish_refresh(attempt, tokens_enc, token_ends_at, ctx))
            }
            Instruction::FailRefresh { attempt } if self.holds_lease(attempt) => {
                let not_before = ctx.now + REFRESH_PAUSE;
                let next = Self { refresh: RefreshState::Idle { not_before }, ..self.clone() };
                Ok(Transition::to(next, Reply::Done, "the identity provider did not answer"))
            }
            Instruction::RefuseRefresh { attempt, error } if self.holds_lease(attempt) => {
                Ok(self.end(EndReason::ProviderRefused { error }, ctx))
            }
            // Another refresh has begun since.
            Instruction::FailRefresh { .. } | Instruction::RefuseRefresh { .. } => Ok(self.unchanged()),
            Instruction::EndByProvider { token_sha256, issued_at } => {
                Ok(self.provider_logout(token_sha256, issued_at, ctx))
            }
        }
    }

    fn touch(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        if self.end_at(ctx.now).is_some() {
            return self.tick(ctx);
        }
        let (lifetime, idle) = limits(&self.scopes(), ctx);
        let mut next = self.clone();
        next.last_seen_at = ctx.now;
        next.idle_ends_at = ctx.now + idle;
        next.ends_at = self.ends_at.min(self.created_at + lifetime);
        Transition::to(next, Reply::Done, "its browser sent a request")
    }

    fn begin_refresh(&self, seen: Timestamp, ctx: &TransitionContext<'_>) -> Transition<Self> {
        if self.token_ends_at != seen {
            return self.unchanged();
        }
        match self.refresh {
            RefreshState::Idle { not_before: wait } | RefreshState::Leased { until: wait, .. } if ctx.now < wait => {
                Transition::stay(Reply::Wait)
            }
            // Its holder may have the only tokens that are valid, and sends them as soon as they can be stored.
            RefreshState::Leased { attempt, is_overdue: false, .. } => {
                let refresh = RefreshState::Leased { attempt, until: ctx.now + REFRESH_NOTICE, is_overdue: true };
                let next = Self { refresh, ..self.clone() };
                Transition::to(next, Reply::Wait, format!("refresh {attempt} of its tokens is overdue"))
            }
            RefreshState::Idle { .. } | RefreshState::Leased { is_overdue: true, .. } => {
                let attempt = self.refreshes.saturating_add(1);
                let until = ctx.now + REFRESH_LEASE;
                let refresh = RefreshState::Leased { attempt, until, is_overdue: false };
                let next = Self { refreshes: attempt, refresh, ..self.clone() };
                let reply = Reply::Leased { attempt, session: Box::new(next.clone()) };
                Transition::to(next, reply, format!("refresh {attempt} of its tokens began"))
            }
        }
    }

    fn finish_refresh(
        &self,
        attempt: u32,
        tokens_enc: String,
        token_ends_at: Timestamp,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        if !self.holds_lease(attempt) {
            return self.unchanged();
        }
        let refresh = RefreshState::Idle { not_before: ctx.now + REFRESH_PAUSE };
        let next = Self { tokens_enc: Some(tokens_enc), token_ends_at, refresh, ..self.clone() };
        let reply = Reply::Session { session: Box::new(next.clone()) };
        Transition::to(next, reply, "its tokens were refreshed")
    }

    /// A login after the logout token was issued is another one: the token, sent again, does not end it.
    fn provider_logout(
        &self,
        token_sha256: String,
        issued_at: Timestamp,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        if self.authenticated_at > issued_at {
            return self.unchanged();
        }
        self.end(EndReason::ProviderLogout { token_sha256 }, ctx)
    }

    fn holds_lease(&self, attempt: u32) -> bool {
        matches!(self.refresh, RefreshState::Leased { attempt: current, .. } if current == attempt) && self.is_active()
    }
}
