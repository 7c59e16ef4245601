//! Slots for service accounts that are being created. Existing ones are counted by a read; in between a slot is reserved, so that no
//! number of simultaneous creations exceeds the limit.

use super::{QuotaScopes, Rejection, Reply, Tenant};
use crate::id::ServiceAccountId;
use crate::policy::PolicyKey;
use crate::state_machine::{Transition, TransitionContext};
use chrono::TimeDelta;
use std::collections::{BTreeMap, BTreeSet};

/// How long a slot is reserved: far longer than a command may take to be answered. After that the account exists and is counted, or never
/// will.
const SLOT_TTL: TimeDelta = TimeDelta::seconds(60);

impl Tenant {
    pub(super) fn expect_account(
        &self,
        account: ServiceAccountId,
        there: &BTreeSet<ServiceAccountId>,
        scopes: QuotaScopes,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let limit = ctx.policy.int(PolicyKey::AuthServiceAccountsPerUser, &self.scopes(scopes), ctx.now);
        let mut expected: BTreeMap<_, _> = self
            .expected_accounts
            .iter()
            .filter(|(_, since)| ctx.now - **since < SLOT_TTL)
            .map(|(k, v)| (*k, *v))
            .collect();
        let mut others: BTreeSet<u64> = there.iter().map(|id| slot_of(*id)).chain(expected.keys().copied()).collect();
        others.remove(&slot_of(account));
        if i64::try_from(others.len()).unwrap_or(i64::MAX) >= limit {
            return Err(Rejection::TooManyServiceAccounts { limit });
        }
        expected.insert(slot_of(account), ctx.now);
        let mut next = self.clone();
        next.expected_accounts = expected;
        Ok(Transition::to(next, Reply::Done, format!("a slot is reserved for service account {account}")))
    }
}

/// The part of the id that a repeated creation shares with the first: the last 62 bits, which come from the command's id.
fn slot_of(account: ServiceAccountId) -> u64 {
    u64::try_from(account.0.as_u128() & ((1 << 62) - 1)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authz::Principal;
    use crate::policy::{PolicyBook, PolicyScope, PolicyValue};
    use crate::state_machine::{Machine, Timestamp};
    use crate::tenant::Request;
    use uuid::Uuid;

    fn id(n: u128) -> ServiceAccountId {
        ServiceAccountId(Uuid::from_u128(n))
    }

    /// A user with a limit of two.
    fn expect(tenant: Option<&Tenant>, account: u128, there: &[u128], second: i64) -> Result<Tenant, Rejection> {
        let mut policy = PolicyBook::default();
        policy
            .set(
                PolicyKey::AuthServiceAccountsPerUser,
                PolicyScope::UserId("ann".into()),
                Timestamp::UNIX_EPOCH,
                PolicyValue::Int(2),
            )
            .unwrap();
        let by = Principal::system("test");
        let now = Timestamp::UNIX_EPOCH + TimeDelta::seconds(second);
        let ctx = TransitionContext::in_test(now, &policy, &by);
        let there = there.iter().map(|n| id(*n)).collect();
        let scopes = QuotaScopes { org_id: None, project_id: None, plan: None };
        let command = Request::ExpectAccount { user_id: "ann".into(), account: id(account), there, scopes };
        Tenant::decide(tenant, command.into(), &ctx).map(|step| step.next.unwrap())
    }

    #[test]
    fn simultaneous_creations_are_admitted_up_to_the_limit() {
        let one = expect(None, 1, &[], 0).unwrap();
        let two = expect(Some(&one), 2, &[], 1).unwrap();
        assert_eq!(expect(Some(&two), 3, &[], 2).err(), Some(Rejection::TooManyServiceAccounts { limit: 2 }));
        // Counted by a read in the meantime, they are still two.
        assert_eq!(expect(Some(&two), 3, &[1, 2], 3).err(), Some(Rejection::TooManyServiceAccounts { limit: 2 }));
    }

    #[test]
    fn repeated_creation_takes_no_second_slot() {
        let later = 1_700_000_000_000_u128 << 80;
        let one = expect(None, 1, &[], 0).unwrap();
        let again = expect(Some(&one), 1 | later, &[], 1).unwrap();
        assert_eq!(again.expected_accounts.len(), 1);
        expect(Some(&again), 2, &[1], 2).unwrap();
    }

    #[test]
    fn unused_account_slot_expires_after_a_minute() {
        let one = expect(None, 1, &[], 0).unwrap();
        let two = expect(Some(&one), 2, &[], 0).unwrap();
        let after = expect(Some(&two), 3, &[], 60).unwrap();
        assert_eq!(after.expected_accounts.len(), 1);
    }

    #[test]
    fn tenant_snapshot_without_service_accounts_is_read() {
        let old = r#"{"user_id":"ann","keys":{},"live":[]}"#;
        assert_eq!(serde_json::from_str::<Tenant>(old).unwrap(), Tenant::new(&"ann".into()));
    }
}
