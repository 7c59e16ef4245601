use super::*;
use crate::authz::authorize;
use crate::policy::PolicyBook;
use crate::state_machine::Command as _;
use proptest::prelude::*;
use uuid::Uuid;

fn person(user_id: &str, roles: &[TokenRole]) -> Principal {
    Principal::Caller(CallerIdentity {
        org_id: Some("acme".into()),
        plan: Some("gold".into()),
        ..CallerIdentity::new(user_id, roles.iter().copied())
    })
}

fn decide_by(
    by: &Principal,
    state: Option<&ServiceAccount>,
    command: Command,
    seed: u128,
) -> Result<Transition<ServiceAccount>, Rejection> {
    let policy = PolicyBook::default();
    let ctx = TransitionContext {
        seed,
        id: Uuid::from_u128(7),
        ..TransitionContext::in_test(Timestamp::UNIX_EPOCH, &policy, by)
    };
    ServiceAccount::decide(state, command, &ctx)
}

fn ann() -> Principal {
    person("ann", &[TokenRole::User])
}

fn create(roles: &[TokenRole]) -> Command {
    Command::Create { name: "ci".into(), roles: roles.iter().copied().collect() }
}

fn with_keys(count: u8) -> ServiceAccount {
    let made = decide_by(&ann(), None, create(&[TokenRole::User]), 0).unwrap().next.unwrap();
    (0..count).fold(made, |account, n| {
        let add = Command::AddKey { sha256: [n; 32] };
        decide_by(&ann(), Some(&account), add, u128::from(n + 1) << 64).unwrap().next.unwrap()
    })
}

#[test]
fn service_account_acts_for_its_creator_in_the_creators_scopes() {
    let account = with_keys(0);
    assert_eq!(account.owner.user_id, "ann");
    assert_eq!((account.owner.org_id.as_deref(), account.owner.plan.as_deref()), (Some("acme"), Some("gold")));
    assert_eq!(account.scopes().org_id.as_deref(), Some("acme"));
    assert_eq!(account.created_by, "user:ann");
}

#[test]
fn creator_cannot_grant_a_role_that_they_lack() {
    let root = person("root", &[TokenRole::Admin]);
    for (by, roles, admitted) in [
        (&ann(), vec![TokenRole::User], true),
        (&ann(), vec![TokenRole::Admin], false),
        (&ann(), vec![TokenRole::User, TokenRole::Admin], false),
        (&ann(), vec![], false),
        (&root, vec![TokenRole::Admin], true),
        (&root, vec![TokenRole::User], true),
        (&Principal::system("x"), vec![TokenRole::User], false),
    ] {
        assert_eq!(decide_by(by, None, create(&roles), 1).is_ok(), admitted, "{by} {roles:?}");
    }
}

#[test]
fn two_keys_are_valid_until_one_is_revoked() {
    let account = with_keys(2);
    let (old, new) = (*account.keys.keys().next().unwrap(), *account.keys.keys().nth(1).unwrap());
    let left = decide_by(&ann(), Some(&account), Command::RevokeKey { key: old }, 1).unwrap().next.unwrap();
    assert_eq!(left.keys.keys().copied().collect::<Vec<_>>(), [new]);
    assert_eq!(
        decide_by(&ann(), Some(&left), Command::RevokeKey { key: old }, 1).err(),
        Some(Rejection::KeyNotFound),
        "it is gone"
    );
}

#[test]
fn service_account_keys_are_bounded() {
    let full = with_keys(5);
    let add = Command::AddKey { sha256: [9; 32] };
    assert_eq!(decide_by(&ann(), Some(&full), add, 1).err(), Some(Rejection::TooManyKeys { limit: 5 }));
}

#[test]
fn accounts_of_other_users_are_not_found_except_by_administrators() {
    let account = with_keys(1);
    let key = *account.keys.keys().next().unwrap();
    let change = || [Command::AddKey { sha256: [9; 32] }, Command::RevokeKey { key }, Command::Delete];
    for command in change() {
        let denied = decide_by(&person("bob", &[TokenRole::User]), Some(&account), command.clone(), 1);
        assert_eq!(denied.err(), Some(Rejection::NotFound), "{command:?}");
        // A key acts as the owner, so that an administrator makes none.
        let is_key = matches!(command, Command::AddKey { .. });
        let by_admin = decide_by(&person("root", &[TokenRole::Admin]), Some(&account), command.clone(), 1);
        assert_eq!(by_admin.err(), is_key.then_some(Rejection::NotFound), "{command:?}");
    }
    let gone = decide_by(&ann(), Some(&account), Command::Delete, 1).unwrap().next.unwrap();
    assert!(gone.keys.is_empty() && gone.state() == "deleted");
    for command in change() {
        assert_eq!(decide_by(&ann(), Some(&gone), command, 1).err(), Some(Rejection::NotFound));
    }
    assert_eq!(decide_by(&ann(), Some(&gone), create(&[TokenRole::User]), 1).err(), Some(Rejection::Exists));
}

#[test]
fn owner_who_has_lost_a_role_gets_no_key_with_it() {
    let root = person("root", &[TokenRole::Admin]);
    let account = decide_by(&root, None, create(&[TokenRole::Admin]), 1).unwrap().next.unwrap();
    let add = || Command::AddKey { sha256: [9; 32] };
    let account = decide_by(&root, Some(&account), add(), 1).unwrap().next.unwrap();
    let demoted = person("root", &[TokenRole::User]);
    assert_eq!(decide_by(&demoted, Some(&account), add(), 2).err(), Some(Rejection::RolesLost));
    let key = *account.keys.keys().next().unwrap();
    decide_by(&demoted, Some(&account), Command::RevokeKey { key }, 3).unwrap();
    decide_by(&demoted, Some(&account), Command::Delete, 3).unwrap();
}

#[test]
fn service_account_cannot_manage_service_accounts() {
    let Principal::Caller(owner) = person("ann", &[TokenRole::User, TokenRole::Admin]) else { unreachable!() };
    let acting = Principal::Caller(CallerIdentity { service_account: Some(ServiceAccountId(Uuid::nil())), ..owner });
    let key = ServiceAccountKeyId(Uuid::nil());
    for command in
        [create(&[TokenRole::User]), Command::AddKey { sha256: [0; 32] }, Command::RevokeKey { key }, Command::Delete]
    {
        assert!(authorize(&acting, command.action()).is_err(), "{command:?}");
    }
}

#[test]
fn every_change_is_audited_and_no_hash_shows() {
    let account = with_keys(1);
    let key = *account.keys.keys().next().unwrap();
    let mut actions = vec![decide_by(&ann(), None, create(&[TokenRole::User]), 1).unwrap().audit.remove(0)];
    for command in [Command::AddKey { sha256: [0xab; 32] }, Command::RevokeKey { key }, Command::Delete] {
        let step = decide_by(&ann(), Some(&account), command, 1).unwrap();
        assert_eq!(step.audit.len(), 1);
        assert!(!format!("{:?} {:?}", step.audit, step.next).contains("171"), "a hash shows");
        actions.extend(step.audit);
    }
    let names: Vec<_> = actions.iter().map(|audit| audit.action).collect();
    assert_eq!(
        names,
        [
            AuditAction::ServiceAccountsCreate,
            AuditAction::ServiceAccountsAddKey,
            AuditAction::ServiceAccountsRevokeKey,
            AuditAction::ServiceAccountsDelete
        ]
    );
    assert!(actions.iter().all(|audit| audit.metadata["owner_user_id"] == "ann"));
}

proptest! {
    #[test]
    fn any_commands_leave_deleted_accounts_without_keys_and_others_within_the_bound(
        moves in prop::collection::vec((0u8..4, any::<u8>()), 0..40)
    ) {
        let mut account = with_keys(0);
        for (n, (kind, which)) in moves.into_iter().enumerate() {
            let nth = account.keys.keys().nth(usize::from(which) % 6).copied();
            let key = nth.unwrap_or(ServiceAccountKeyId(Uuid::nil()));
            let command = match kind {
                0 | 1 => Command::AddKey { sha256: [which; 32] },
                2 => Command::RevokeKey { key },
                // Rarely, or the test covers little.
                _ if which < 32 => Command::Delete,
                _ => Command::Tick,
            };
            if let Ok(Transition { next: Some(next), .. }) = decide_by(&ann(), Some(&account), command, (n as u128 + 1) << 64) {
                let stored = serde_json::to_string(&next).unwrap();
                prop_assert_eq!(&serde_json::from_str::<ServiceAccount>(&stored).unwrap(), &next);
                account = next;
            }
            prop_assert!(account.keys.len() <= 5);
            prop_assert!(account.is_active() || account.keys.is_empty());
        }
    }
}
