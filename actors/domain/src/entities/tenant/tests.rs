use super::*;
use crate::authz::{CallerIdentity, Principal, TokenRole};
use crate::policy::{PolicyBook, PolicyScope, PolicyValue};
use crate::state_machine::Command as _;
use proptest::prelude::*;
use uuid::Uuid;

fn user(user_id: &str, role: TokenRole) -> Principal {
    Principal::Caller(CallerIdentity::new(user_id, [role]))
}

fn book(quota: i64) -> PolicyBook {
    let mut book = PolicyBook::default();
    book.set(PolicyKey::AllocationMaxConcurrent, PolicyScope::Global, Timestamp::UNIX_EPOCH, PolicyValue::Int(quota))
        .unwrap();
    book
}

fn decide(
    state: Option<&Tenant>,
    command: impl Into<Command>,
    seed: u128,
    quota: i64,
) -> Result<Transition<Tenant>, Rejection> {
    let (policy, by) = (book(quota), user("ann", TokenRole::User));
    let (now, id) = (Timestamp::UNIX_EPOCH, Uuid::nil());
    Tenant::decide(
        state,
        command.into(),
        &TransitionContext { seed, id, ..TransitionContext::in_test(now, &policy, &by) },
    )
}

fn add(n: usize) -> Request {
    Request::AddKey {
        user_id: "ann".into(),
        name: format!("key {n}"),
        key_type: "ssh-ed25519".into(),
        public_key: format!("ssh-ed25519 {n}"),
        fingerprint: format!("SHA256:{n}"),
    }
}

fn admit(n: u128) -> Instruction {
    let scopes = QuotaScopes { org_id: None, project_id: None, plan: None };
    let allocation_id = AllocationId(Uuid::from_u128(n));
    Instruction::Admit { user_id: "ann".into(), allocation_id, scopes, logins_revision: 0 }
}

fn forget(n: u128) -> Instruction {
    Instruction::Forget { allocation_id: AllocationId(Uuid::from_u128(n)) }
}

fn with_keys(count: usize) -> Tenant {
    (0..count).fold(Tenant::new(&"ann".into()), |tenant, n| {
        decide(Some(&tenant), add(n), n as u128 * 0x1_0000_0000_0000_0000, 50).unwrap().next.unwrap()
    })
}

fn defaults(tenant: &Tenant) -> usize {
    tenant.keys.values().filter(|key| key.is_default).count()
}

fn ctx<'a>(now: Timestamp, policy: &'a PolicyBook, by: &'a Principal) -> TransitionContext<'a> {
    TransitionContext::in_test(now, policy, by)
}

#[test]
fn tenant_with_all_keys_and_allocations_that_policies_admit_is_within_its_bound() {
    let most = |key: PolicyKey| usize::try_from(key.most()).unwrap();
    let mut tenant = Tenant::new(&"u".repeat(255).into());
    for n in 0..most(PolicyKey::SshKeyMaxPerUser) {
        let id = SshKeyId(Uuid::from_u128(n as u128));
        let key = SshKey {
            id,
            name: "\u{1f511}".repeat(100),
            key_type: "sk-ecdsa-sha2-nistp256@openssh.com".into(),
            public_key: "k".repeat(3 * 1024),
            fingerprint: "f".repeat(50),
            is_default: false,
            created_by: format!("user:{}", "u".repeat(255)),
            created_at: Timestamp::UNIX_EPOCH,
        };
        tenant.keys.insert(id, key);
    }
    tenant.live =
        (0..most(PolicyKey::AllocationMaxConcurrent)).map(|n| AllocationId(Uuid::from_u128(n as u128))).collect();
    let size = serde_json::to_string(&tenant).unwrap().len();
    assert!(size < Tenant::SNAPSHOT_MOST, "{size}");
}

#[test]
fn keys_are_changed_only_by_their_owner_or_an_administrator() {
    let (policy, tenant) = (book(50), with_keys(2));
    let other = tenant.keys.values().find(|key| !key.is_default).unwrap().id;
    for command in [Request::MakeDefault { key: other }, Request::DeleteKey { key: other }] {
        let asked = |by: &Principal| {
            Tenant::decide(Some(&tenant), command.clone().into(), &ctx(Timestamp::UNIX_EPOCH, &policy, by))
                .map(|step| step.next)
        };
        assert_eq!(asked(&user("bob", TokenRole::User)), Err(Rejection::NotFound));
        assert!(
            asked(&user("ann", TokenRole::User)).unwrap().is_some()
                && asked(&user("root", TokenRole::Admin)).unwrap().is_some()
        );
    }
}

#[test]
fn refused_key_mutations_are_audited_with_their_cause_and_without_input() {
    let (policy, by) = (book(50), user("ann", TokenRole::User));
    let (tenant, now) = (with_keys(1), Timestamp::UNIX_EPOCH);
    let nobodys = SshKeyId(Uuid::from_u128(99));
    for (command, action) in [
        (add(0), AuditAction::SshKeysCreate),
        (Request::DeleteKey { key: nobodys }, AuditAction::SshKeysDelete),
        (Request::MakeDefault { key: nobodys }, AuditAction::SshKeysMakeDefault),
    ] {
        let command = Command::from(command);
        let rejection = decide(Some(&tenant), command.clone(), 1, 50).unwrap_err();
        let refused = tenant.audit_refusal(&command, &rejection, &ctx(now, &policy, &by)).unwrap();
        assert_eq!((refused.audit.action, &refused.audit.metadata["result"]), (action, &json!("refused")));
        assert_eq!(refused.audit.metadata["cause"], rejection.to_string());
        assert!(refused.next.audit_refusal(&command, &rejection, &ctx(now, &policy, &by)).is_none(), "one a minute");
    }
    let quota = Rejection::OverQuota { limit: 1 };
    assert!(tenant.audit_refusal(&admit(1).into(), &quota, &ctx(now, &policy, &by)).is_none());

    // An unreadable key is refused by the edge, also for a user without a tenant entity.
    let command = Request::RefuseKey { user_id: "ann".into(), cause: SshKeyFault::PrivateKey };
    let step = decide(None, command.clone(), 1, 50).unwrap();
    assert_eq!(step.audit[0].metadata, json!({"result": "refused", "code": "private_key"}));
    let repeated = decide(step.next.as_ref(), command, 1, 50).unwrap();
    assert!(repeated.next.is_none() && repeated.audit.is_empty());
}

#[test]
fn tenant_is_created_with_its_first_stored_data() {
    assert!(decide(None, add(1), 1, 50).unwrap().next.is_some());
    assert!(decide(None, admit(1), 1, 50).unwrap().next.is_some());
    assert!(decide(None, forget(1), 1, 50).unwrap().next.is_none());
    assert!(decide(None, Command::TICK, 1, 50).unwrap().next.is_none());
    let nobodys = SshKeyId(Uuid::nil());
    assert_eq!(decide(None, Request::DeleteKey { key: nobodys }, 1, 50).err(), Some(Rejection::NotFound));
    assert_eq!(decide(None, Request::MakeDefault { key: nobodys }, 1, 50).err(), Some(Rejection::NotFound));
    // A quota of zero admits no allocation.
    assert_eq!(decide(None, admit(1), 1, 0).err(), Some(Rejection::OverQuota { limit: 0 }));
}

#[test]
fn the_first_key_is_the_default_and_it_passes_on_when_deleted() {
    let tenant = with_keys(3);
    let first = tenant.default_key().unwrap().clone();
    assert_eq!(first.name, "key 0");
    let heir = decide(Some(&tenant), Request::DeleteKey { key: first.id }, 1, 50).unwrap().next.unwrap();
    assert_eq!(defaults(&heir), 1);
}

#[test]
fn choosing_the_key_that_is_the_default_already_changes_nothing() {
    let tenant = with_keys(2);
    let key = tenant.default_key().unwrap().clone();
    let step = decide(Some(&tenant), Request::MakeDefault { key: key.id }, 1, 50).unwrap();
    assert_eq!((step.next, step.events.len(), step.audit.len()), (None, 0, 0));
    assert_eq!(step.reply, Reply::Key { key });
}

#[test]
fn keys_are_unique_and_bounded() {
    let tenant = with_keys(100);
    let existing = tenant.keys.values().find(|key| key.fingerprint == "SHA256:7").unwrap().id;
    assert_eq!(decide(Some(&tenant), add(7), 1, 50).err(), Some(Rejection::KeyExists { existing }));
    assert_eq!(decide(Some(&tenant), add(100), 1, 50).err(), Some(Rejection::TooManyKeys { limit: 100 }));
}

#[test]
fn every_change_of_a_key_is_audited() {
    let tenant = with_keys(2);
    let key = tenant.keys.values().find(|key| !key.is_default).unwrap().id;
    for command in [add(9), Request::MakeDefault { key }, Request::DeleteKey { key }] {
        let step = decide(Some(&tenant), command, 77, 50).unwrap();
        assert_eq!(step.audit.len(), 1);
        assert_eq!(step.audit[0].metadata["result"], "ok");
    }
}

#[test]
fn lowered_quota_keeps_existing_allocations() {
    let two = [1, 2]
        .into_iter()
        .fold(Tenant::new(&"ann".into()), |tenant, n| decide(Some(&tenant), admit(n), 1, 50).unwrap().next.unwrap());
    assert_eq!(decide(Some(&two), admit(3), 1, 1).err(), Some(Rejection::OverQuota { limit: 1 }));
    assert!(decide(Some(&two), admit(2), 1, 1).unwrap().next.is_none(), "admitted before");
}

proptest! {
    #[test]
    fn the_quota_is_never_exceeded_and_counts_each_allocation_once(
        moves in prop::collection::vec((any::<bool>(), 0u128..8), 0..60), quota in 0i64..5
    ) {
        let mut tenant = Tenant::new(&"ann".into());
        for (comes, n) in moves {
            let command = if comes { admit(n) } else { forget(n) };
            if let Ok(Transition { next: Some(next), .. }) = decide(Some(&tenant), command, 1, quota) {
                tenant = next;
            }
            prop_assert!(tenant.live.len() as i64 <= quota);
        }
    }

    #[test]
    fn of_any_keys_exactly_one_is_the_default(
        moves in prop::collection::vec((0u8..3, 0usize..6), 0..40)
    ) {
        let mut tenant = Tenant::new(&"ann".into());
        for (n, (kind, which)) in moves.into_iter().enumerate() {
            let key = tenant.keys.keys().nth(which).copied().unwrap_or(SshKeyId(Uuid::nil()));
            let command = match kind {
                0 => add(which),
                1 => Request::DeleteKey { key },
                _ => Request::MakeDefault { key },
            };
            if let Ok(Transition { next: Some(next), .. }) = decide(Some(&tenant), command, (n as u128) << 64, 50) {
                let stored = serde_json::to_string(&next).unwrap();
                prop_assert_eq!(&serde_json::from_str::<Tenant>(&stored).unwrap(), &next);
                tenant = next;
            }
            prop_assert_eq!(defaults(&tenant), usize::from(!tenant.keys.is_empty()));
        }
    }
}
