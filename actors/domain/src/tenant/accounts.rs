//! Places for service accounts that are being made. Those that were made are counted by a read; between the two a place is kept, so
//! that of any number of creations at once none goes past the limit.

use super::{AskedScopes, Rejection, Reply, Tenant};
use crate::id::ServiceAccountId;
use crate::machine::{Ctx, Step};
use crate::policy::Key;
use chrono::TimeDelta;
use std::collections::{BTreeMap, BTreeSet};

/// How long a place is kept: far longer than a command may take to be answered. After that the account is there and counted, or never
/// will be.
const KEPT_FOR: TimeDelta = TimeDelta::seconds(60);

impl Tenant {
    pub(super) fn expect_account(
        &self,
        account: ServiceAccountId,
        there: &BTreeSet<ServiceAccountId>,
        scopes: AskedScopes,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        let limit = ctx.policy.int(Key::AuthServiceAccountsPerUser, &self.scopes(scopes), ctx.now);
        let mut expected: BTreeMap<_, _> = self
            .expected_accounts
            .iter()
            .filter(|(_, since)| ctx.now - **since < KEPT_FOR)
            .map(|(k, v)| (*k, *v))
            .collect();
        let mut others: BTreeSet<u64> = there.iter().map(|id| place_of(*id)).chain(expected.keys().copied()).collect();
        others.remove(&place_of(account));
        if i64::try_from(others.len()).unwrap_or(i64::MAX) >= limit {
            return Err(Rejection::TooManyServiceAccounts { limit });
        }
        expected.insert(place_of(account), ctx.now);
        let mut next = self.clone();
        next.expected_accounts = expected;
        Ok(Step::to(next, Reply::Done, format!("a place is kept for service account {account}")))
    }
}

/// What a repeated creation shares with the first: the last 62 bits of the id, which come from the command's.
fn place_of(account: ServiceAccountId) -> u64 {
    u64::try_from(account.0.as_u128() & ((1 << 62) - 1)).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::authz::Principal;
    use crate::machine::{Machine, Timestamp};
    use crate::policy::{PolicyBook, Scope, Value};
    use crate::tenant::Command;
    use uuid::Uuid;

    fn id(n: u128) -> ServiceAccountId {
        ServiceAccountId(Uuid::from_u128(n))
    }

    /// A user who may have two.
    fn expect(tenant: Option<&Tenant>, account: u128, there: &[u128], second: i64) -> Result<Tenant, Rejection> {
        let mut policy = PolicyBook::default();
        policy
            .set(Key::AuthServiceAccountsPerUser, Scope::UserId("ann".into()), Timestamp::UNIX_EPOCH, Value::Int(2))
            .unwrap();
        let by = Principal::system("test");
        let now = Timestamp::UNIX_EPOCH + TimeDelta::seconds(second);
        let ctx = Ctx { now, policy: &policy, by: &by, correlation_id: "c", seed: 1, id: Uuid::nil(), version: 1 };
        let there = there.iter().map(|n| id(*n)).collect();
        let scopes = AskedScopes { org_id: None, project_id: None, plan: None };
        let command = Command::ExpectAccount { user_id: "ann".into(), account: id(account), there, scopes };
        Tenant::decide(tenant, command, &ctx).map(|step| step.next.unwrap())
    }

    #[test]
    fn of_creations_at_once_as_many_are_admitted_as_there_is_room_for() {
        let one = expect(None, 1, &[], 0).unwrap();
        let two = expect(Some(&one), 2, &[], 1).unwrap();
        assert_eq!(expect(Some(&two), 3, &[], 2).err(), Some(Rejection::TooManyServiceAccounts { limit: 2 }));
        // Read back meanwhile, they are still two.
        assert_eq!(expect(Some(&two), 3, &[1, 2], 3).err(), Some(Rejection::TooManyServiceAccounts { limit: 2 }));
    }

    #[test]
    fn a_repetition_takes_no_second_place() {
        let later = 1_700_000_000_000_u128 << 80;
        let one = expect(None, 1, &[], 0).unwrap();
        let again = expect(Some(&one), 1 | later, &[], 1).unwrap();
        assert_eq!(again.expected_accounts.len(), 1);
        expect(Some(&again), 2, &[1], 2).unwrap();
    }

    #[test]
    fn a_place_that_nobody_took_is_free_after_a_minute() {
        let one = expect(None, 1, &[], 0).unwrap();
        let two = expect(Some(&one), 2, &[], 0).unwrap();
        let after = expect(Some(&two), 3, &[], 60).unwrap();
        assert_eq!(after.expected_accounts.len(), 1);
    }

    #[test]
    fn a_snapshot_from_before_there_were_service_accounts_is_read() {
        let old = r#"{"user_id":"ann","keys":{},"live":[]}"#;
        assert_eq!(serde_json::from_str::<Tenant>(old).unwrap(), Tenant::new("ann"));
    }
}
