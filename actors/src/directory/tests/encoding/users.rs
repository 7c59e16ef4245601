//! Users: their keys, roles and logins, their service accounts, and a principal itself.

use super::*;
use domain::authz::CallerIdentity;
use domain::role_bindings::{self, RoleBindings};
use domain::state_machine::RequestOrigin;
use domain::tenant::{self, Tenant};

#[test]
fn of_a_tenant() {
    use tenant::{Command, Instruction, QuotaScopes, Rejection, Reply, Request};
    let add = Request::AddKey {
        user_id: "ann".into(),
        name: text(),
        key_type: "ssh-ed25519".into(),
        public_key: "ssh-ed25519 AAAA".into(),
        fingerprint: "SHA256:x".into(),
    };
    let (_, reply) = decided::<Tenant>(None, add.clone(), &ann(), ALLOCATION);
    let ssh_key = SshKeyId(ALLOCATION);
    let scopes = QuotaScopes { org_id: None, project_id: Some("p".into()), plan: Some(text()) };
    let commands: Vec<Command> = vec![
        add.into(),
        Request::DeleteKey { key: ssh_key }.into(),
        Request::MakeDefault { key: ssh_key }.into(),
        Instruction::Admit { user_id: "ann".into(), allocation_id: TENANT, scopes: scopes.clone(), logins_revision: 1 }
            .into(),
        Request::ExpectTerminal {
            user_id: "ann".into(),
            allocation_id: TENANT,
            session: domain::TerminalSessionId(ALLOCATION),
            there: [domain::TerminalSessionId(Uuid::nil())].into(),
            over: [domain::TerminalSessionId(ALLOCATION)].into(),
            scopes,
        }
        .into(),
        Instruction::Forget { allocation_id: TENANT }.into(),
        Request::ExpectAccount {
            user_id: "ann".into(),
            account: domain::ServiceAccountId(ALLOCATION),
            there: [domain::ServiceAccountId(Uuid::nil())].into(),
            scopes: QuotaScopes { org_id: Some(text().into()), project_id: None, plan: None },
        }
        .into(),
        Command::TICK,
    ];
    let rejections = [
        Rejection::NotFound,
        Rejection::KeyExists { existing: ssh_key },
        Rejection::TooManyKeys { limit: 100 },
        Rejection::OverQuota { limit: 50 },
        Rejection::TooManyServiceAccounts { limit: 20 },
        Rejection::TooManyTerminals { limit: 8 },
    ];
    survives::<Tenant>(commands, [reply, Reply::Done], rejections);
}

#[test]
fn command_with_a_list_in_place_of_an_object_is_refused() {
    use tenant::{Command, Instruction, QuotaScopes};
    let scopes = QuotaScopes { org_id: None, project_id: Some("p".into()), plan: None };
    let admit = Instruction::Admit { user_id: "ann".into(), allocation_id: TENANT, scopes, logins_revision: 1 };
    let mut command = serde_json::to_value(Command::from(admit)).unwrap();
    command["scopes"] = json!([null, "p", null]);
    serde_json::from_value::<Command>(command.clone()).expect("serde alone reads the list");
    let refused = strict_json::tagged::from_value::<Command>(command).unwrap_err();
    assert_eq!(refused.to_string(), "`scopes` is a list; it must be an object");
}

#[test]
fn of_a_browser_session() {
    use domain::browser_session::{
        BrowserSession, Command, Instruction, Maintenance, Opening, Place, Rejection, Reply, Request, SecretDigest,
    };
    let open = Request::Open(Box::new(Opening {
        secret_sha256: SecretDigest([7; 32]),
        subject: text(),
        provider_session: Some(text()),
        authenticated_at: at(),
        place: Place { address: text(), user_agent: text() },
        tokens_enc: "AA==".into(),
        token_ends_at: at(),
    }));
    let worker = crate::testing::worker();
    let (session, opened) = decided::<BrowserSession>(None, open.clone(), &ann(), ALLOCATION);
    let begin = Instruction::BeginRefresh { token_ends_at: at() };
    let (_, leased) = decided(Some(&session), begin.clone(), &worker, ALLOCATION);
    let commands: Vec<Command> = vec![
        open.into(),
        Request::EndByUser.into(),
        Request::EndByAdministrator { reason: text() }.into(),
        Instruction::Touch.into(),
        Instruction::LogOut.into(),
        Instruction::Displace.into(),
        begin.into(),
        Instruction::FinishRefresh { attempt: 1, tokens_enc: "AA==".into(), token_ends_at: at() }.into(),
        Instruction::FailRefresh { attempt: 1 }.into(),
        Instruction::RefuseRefresh { attempt: 1, error: text() }.into(),
        Instruction::EndByProvider { token_sha256: "00".into(), issued_at: at() }.into(),
        Maintenance::Reseal { before: "AA==".into(), tokens_enc: "AQ==".into() }.into(),
        Command::TICK,
    ];
    let replies = [opened, leased, Reply::Wait, Reply::Done];
    let rejections = [Rejection::NotFound, Rejection::Exists, Rejection::Ended { reason: text() }];
    survives::<BrowserSession>(commands, replies, rejections);
}

#[test]
fn of_bindings() {
    use role_bindings::{Command, Rejection, Reply};
    let role = PlatformRole::Auditor;
    let bind = Command::Bind { subject: "ann".into(), role, reason: text() };
    let (_, reply) = decided::<RoleBindings>(None, bind.clone(), &user("root", &[TokenRole::Admin]), ALLOCATION);
    let commands = vec![
        bind,
        Command::Revoke { role, reason: Some(text()) },
        Command::Revoke { role, reason: None },
        Command::Tick,
    ];
    survives::<RoleBindings>(commands, [reply, Reply::Done], [Rejection::NotBound]);
}

#[test]
fn of_a_principal() {
    let Principal::Caller(caller) = user("ann", &[TokenRole::User, TokenRole::Admin]) else { unreachable!() };
    let from = Precondition { entity: ALLOCATION, version: 3 };
    let grant = Some(Grant { roles: [PlatformRole::Auditor].into(), from });
    let permit = authorize(&Principal::Caller(CallerIdentity { grant, ..caller }), Action::Rent).unwrap();
    let origin = RequestOrigin::untraced("c").traced(Some("00-trace".into()), Some("vendor=1".to_owned()));
    let asked = CommandContext::from_origin(&permit, origin, at()).with_key(key("k")).urgent();
    let bytes = serde_json::to_vec(&asked).unwrap();
    let back: CommandContext = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(format!("{back:?}"), format!("{asked:?}"));
}

#[test]
fn of_a_service_account() {
    use domain::service_account::{Command, Rejection, Reply, ServiceAccount};
    let create = Command::Create { name: "ci".into(), roles: [TokenRole::User, TokenRole::Admin].into() };
    let root = user("root", &[TokenRole::Admin]);
    let (_, reply) = decided::<ServiceAccount>(None, create.clone(), &root, ALLOCATION);
    let key = domain::ServiceAccountKeyId(ALLOCATION);
    let commands =
        vec![create, Command::AddKey { sha256: [7; 32] }, Command::RevokeKey { key }, Command::Delete, Command::Tick];
    let rejections = [
        Rejection::NotFound,
        Rejection::KeyNotFound,
        Rejection::Exists,
        Rejection::RolesNotHeld,
        Rejection::TooManyKeys { limit: 5 },
    ];
    survives::<ServiceAccount>(commands, [reply, Reply::Key { id: key, created_at: at() }, Reply::Done], rejections);
}

#[test]
fn of_a_service_account_as_principal() {
    let Principal::Caller(owner) = ann() else { panic!("ann is a person") };
    let service_account = Some(domain::ServiceAccountId(ALLOCATION));
    let permit =
        authorize(&Principal::Caller(domain::authz::CallerIdentity { service_account, ..owner }), Action::Rent)
            .unwrap();
    let bytes = serde_json::to_vec(&CommandContext::new(&permit, "c", at())).unwrap();
    let back: CommandContext = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(back.by.to_string(), format!("service-account:{ALLOCATION}"));
    // It is still a service account at the other member: its rights did not grow in transit.
    assert!(authorize(&back.by, Action::KeepServiceAccounts).is_err());
}
