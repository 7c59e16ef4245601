//! Slots for terminal sessions that are being opened. Open ones are counted by a read; in between a slot is reserved, so that no number of
//! simultaneous requests exceeds the limit.

use super::{QuotaScopes, Rejection, Reply, Tenant};
use crate::id::{AllocationId, TerminalSessionId};
use crate::policy::PolicyKey;
use crate::state_machine::{Transition, TransitionContext};
use chrono::TimeDelta;
use std::collections::BTreeSet;

/// As for service accounts: far longer than a command may take to be answered.
const SLOT_TTL: TimeDelta = TimeDelta::seconds(60);

impl Tenant {
    pub(super) fn expect_terminal(
        &self,
        allocation_id: AllocationId,
        session: TerminalSessionId,
        there: &BTreeSet<TerminalSessionId>,
        over: &BTreeSet<TerminalSessionId>,
        scopes: QuotaScopes,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let limit = ctx.policy.int(PolicyKey::TerminalSessionsPerAllocation, &self.scopes(scopes), ctx.now);
        let mut next = self.clone();
        for expected in next.expected_terminals.values_mut() {
            expected.retain(|session, since| ctx.now - *since < SLOT_TTL && !over.contains(session));
        }
        next.expected_terminals.retain(|_, expected| !expected.is_empty());
        let expected = next.expected_terminals.entry(allocation_id).or_default();
        let mut others: BTreeSet<_> = there.iter().chain(expected.keys()).copied().collect();
        others.remove(&session);
        if i64::try_from(others.len()).unwrap_or(i64::MAX) >= limit {
            return Err(Rejection::TooManyTerminals { limit });
        }
        expected.insert(session, ctx.now);
        Ok(Transition::to(next, Reply::Done, format!("a slot is reserved for terminal session {session}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authz::Principal;
    use crate::policy::{PolicyBook, PolicyScope, PolicyValue};
    use crate::state_machine::{Machine, Timestamp};
    use crate::tenant::Request;
    use uuid::Uuid;

    /// A user with a limit of two on each allocation.
    fn expect(
        tenant: Option<&Tenant>,
        allocation: u128,
        session: u128,
        there: &[u128],
        second: i64,
    ) -> Result<Tenant, Rejection> {
        expect_without(tenant, allocation, session, there, &[], second)
    }

    /// The same, of a caller that knows of closed sessions.
    fn expect_without(
        tenant: Option<&Tenant>,
        allocation: u128,
        session: u128,
        there: &[u128],
        over: &[u128],
        second: i64,
    ) -> Result<Tenant, Rejection> {
        let mut policy = PolicyBook::default();
        let key = PolicyKey::TerminalSessionsPerAllocation;
        policy.set(key, PolicyScope::Global, Timestamp::UNIX_EPOCH, PolicyValue::Int(2)).unwrap();
        let by = Principal::system("test");
        let ctx = TransitionContext::in_test(Timestamp::UNIX_EPOCH + TimeDelta::seconds(second), &policy, &by);
        let id = |n: &u128| TerminalSessionId(Uuid::from_u128(*n));
        let command = Request::ExpectTerminal {
            user_id: "ann".into(),
            allocation_id: AllocationId(Uuid::from_u128(allocation)),
            session: id(&session),
            there: there.iter().map(id).collect(),
            over: over.iter().map(id).collect(),
            scopes: QuotaScopes { org_id: None, project_id: None, plan: None },
        };
        Tenant::decide(tenant, command.into(), &ctx).map(|step| step.next.unwrap())
    }

    #[test]
    fn simultaneous_sessions_are_admitted_up_to_the_limit() {
        let one = expect(None, 1, 1, &[], 0).unwrap();
        let two = expect(Some(&one), 1, 2, &[], 0).unwrap();
        let over = Some(Rejection::TooManyTerminals { limit: 2 });
        assert_eq!(expect(Some(&two), 1, 3, &[], 0).err(), over);
        // Counted by a read in the meantime, they are still two.
        assert_eq!(expect(Some(&two), 1, 3, &[1, 2], 1).err(), over);
        // Another allocation has slots of its own.
        expect(Some(&two), 2, 3, &[], 0).unwrap();
    }

    #[test]
    fn closed_session_frees_its_slot_at_once() {
        let one = expect(None, 1, 1, &[], 0).unwrap();
        let two = expect(Some(&one), 1, 2, &[], 0).unwrap();
        assert!(expect(Some(&two), 1, 3, &[2], 1).is_err());
        let three = expect_without(Some(&two), 1, 3, &[2], &[1], 1).unwrap();
        assert_eq!(three.expected_terminals.values().map(|expected| expected.len()).sum::<usize>(), 2);
    }

    #[test]
    fn unused_terminal_slot_expires_after_a_minute_and_is_removed() {
        let one = expect(None, 1, 1, &[], 0).unwrap();
        let two = expect(Some(&one), 1, 2, &[], 0).unwrap();
        let after = expect(Some(&two), 2, 3, &[], 60).unwrap();
        assert_eq!(after.expected_terminals.len(), 1);
    }
}
