//! Places for terminal sessions that are being opened. Those that were opened are counted by a read; between the two a place is kept, so
//! that of any number of requests at once none goes past the limit.

use super::{AskedScopes, Rejection, Reply, Tenant};
use crate::id::{AllocationId, TerminalSessionId};
use crate::machine::{Ctx, Step};
use crate::policy::Key;
use chrono::TimeDelta;
use std::collections::BTreeSet;

/// As for service accounts: far longer than a command may take to be answered.
const KEPT_FOR: TimeDelta = TimeDelta::seconds(60);

impl Tenant {
    pub(super) fn expect_terminal(
        &self,
        allocation_id: AllocationId,
        session: TerminalSessionId,
        there: &BTreeSet<TerminalSessionId>,
        over: &BTreeSet<TerminalSessionId>,
        scopes: AskedScopes,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        let limit = ctx.policy.int(Key::TerminalSessionsPerAllocation, &self.scopes(scopes), ctx.now);
        let mut next = self.clone();
        for expected in next.expected_terminals.values_mut() {
            expected.retain(|session, since| ctx.now - *since < KEPT_FOR && !over.contains(session));
        }
        next.expected_terminals.retain(|_, expected| !expected.is_empty());
        let expected = next.expected_terminals.entry(allocation_id).or_default();
        let mut others: BTreeSet<_> = there.iter().chain(expected.keys()).copied().collect();
        others.remove(&session);
        if i64::try_from(others.len()).unwrap_or(i64::MAX) >= limit {
            return Err(Rejection::TooManyTerminals { limit });
        }
        expected.insert(session, ctx.now);
        Ok(Step::to(next, Reply::Done, format!("a place is kept for terminal session {session}")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::authz::Principal;
    use crate::machine::{Machine, Timestamp, Trace};
    use crate::policy::{PolicyBook, Scope, Value};
    use crate::tenant::Command;
    use uuid::Uuid;

    /// A user who may have two on each allocation.
    fn expect(
        tenant: Option<&Tenant>,
        allocation: u128,
        session: u128,
        there: &[u128],
        second: i64,
    ) -> Result<Tenant, Rejection> {
        expect_without(tenant, allocation, session, there, &[], second)
    }

    /// The same, of a caller who knows of sessions that are over.
    fn expect_without(
        tenant: Option<&Tenant>,
        allocation: u128,
        session: u128,
        there: &[u128],
        over: &[u128],
        second: i64,
    ) -> Result<Tenant, Rejection> {
        let mut policy = PolicyBook::default();
        let key = Key::TerminalSessionsPerAllocation;
        policy.set(key, Scope::Global, Timestamp::UNIX_EPOCH, Value::Int(2)).unwrap();
        let by = Principal::system("test");
        let ctx = Ctx {
            now: Timestamp::UNIX_EPOCH + TimeDelta::seconds(second),
            policy: &policy,
            by: &by,
            correlation_id: "c",
            trace: Trace::default(),
            seed: 1,
            id: Uuid::nil(),
            version: 1,
        };
        let id = |n: &u128| TerminalSessionId(Uuid::from_u128(*n));
        let command = Command::ExpectTerminal {
            user_id: "ann".into(),
            allocation_id: AllocationId(Uuid::from_u128(allocation)),
            session: id(&session),
            there: there.iter().map(id).collect(),
            over: over.iter().map(id).collect(),
            scopes: AskedScopes { org_id: None, project_id: None, plan: None },
        };
        Tenant::decide(tenant, command, &ctx).map(|step| step.next.unwrap())
    }

    #[test]
    fn of_sessions_at_once_as_many_are_admitted_as_there_is_room_for() {
        let one = expect(None, 1, 1, &[], 0).unwrap();
        let two = expect(Some(&one), 1, 2, &[], 0).unwrap();
        let over = Some(Rejection::TooManyTerminals { limit: 2 });
        assert_eq!(expect(Some(&two), 1, 3, &[], 0).err(), over);
        // Read back meanwhile, they are still two.
        assert_eq!(expect(Some(&two), 1, 3, &[1, 2], 1).err(), over);
        // Another allocation has places of its own.
        expect(Some(&two), 2, 3, &[], 0).unwrap();
    }

    #[test]
    fn session_that_is_over_gives_its_place_back_at_once() {
        let one = expect(None, 1, 1, &[], 0).unwrap();
        let two = expect(Some(&one), 1, 2, &[], 0).unwrap();
        assert!(expect(Some(&two), 1, 3, &[2], 1).is_err());
        let three = expect_without(Some(&two), 1, 3, &[2], &[1], 1).unwrap();
        assert_eq!(three.expected_terminals.values().map(|expected| expected.len()).sum::<usize>(), 2);
    }

    #[test]
    fn a_place_that_nobody_took_is_free_after_a_minute_and_leaves_nothing_behind() {
        let one = expect(None, 1, 1, &[], 0).unwrap();
        let two = expect(Some(&one), 1, 2, &[], 0).unwrap();
        let after = expect(Some(&two), 2, 3, &[], 60).unwrap();
        assert_eq!(after.expected_terminals.len(), 1);
    }
}
