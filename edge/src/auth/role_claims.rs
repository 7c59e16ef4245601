//! The roles in a token: where a provider writes them, in which form, and which of its names grant a role of this service.
//!
//! A role is granted by its exact name alone. An entry that cannot be read grants nothing, and is no reason to refuse the token.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use domain::authz::TokenRole;
use serde_json::{Map, Value};
use tokio::time::Instant;

use super::claims::{at, kind_of};

/// Claims that are lists of scopes, which blanks separate (RFC 6749, section 3.3; RFC 9068, section 2.2.3; `scp` of Entra ID).
const SCOPE_CLAIMS: [&str; 2] = ["scope", "scp"];

/// The time between two remarks in the log.
const REMARK_GAP: Duration = Duration::from_secs(60);

/// How the roles of a token are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleRules {
    /// What separates the names where the claim is one text. `None`: the text is one name.
    pub separator: Option<char>,
    /// By a provider's name, exactly as its tokens have it: the roles that it grants. Other names grant none.
    pub mapping: BTreeMap<String, BTreeSet<TokenRole>>,
}

impl Default for RoleRules {
    /// The provider has the names of this service (decisions 3, *Scopes*).
    fn default() -> Self {
        let mapping = TOKEN_ROLES.map(|(name, role)| (name.to_owned(), BTreeSet::from([role])));
        Self { separator: None, mapping: mapping.into() }
    }
}

/// The roles that tokens can grant, with their names.
pub const TOKEN_ROLES: [(&str, TokenRole); 2] = [("user", TokenRole::User), ("admin", TokenRole::Admin)];

/// The roles of a token, and what of them could not be read.
pub(super) struct RoleReading {
    pub(super) granted: BTreeSet<TokenRole>,
    pub(super) remark: Option<RoleRemark>,
}

/// Why a valid token grants no role, or less than its provider may have meant. It has no value of the token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleRemark {
    claim: String,
    problem: RoleProblem,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum RoleProblem {
    Missing,
    /// The provider has left out a list that is too long for a token (Entra ID's *groups overage*).
    LeftOut,
    OfKind(&'static str),
    Unseparated,
    Unmapped(usize),
    Unreadable(usize),
}

impl fmt::Display for RoleRemark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let claim = &self.claim;
        match self.problem {
            RoleProblem::Missing => write!(
                f,
                "the token has no claim `{claim}`: SVC_OIDC_CLAIM_ROLES names the claim with the roles, and the provider has to put it into access tokens"
            ),
            RoleProblem::LeftOut => write!(
                f,
                "the provider left claim `{claim}` out of the token, since it has too many entries (`_claim_names`): have it send roles of the \
                 application, or the groups of the application alone, and name that claim in SVC_OIDC_CLAIM_ROLES"
            ),
            RoleProblem::OfKind(kind) => write!(
                f,
                "claim `{claim}` is {kind}, and no list, text or object of roles: SVC_OIDC_CLAIM_ROLES names the claim with the roles"
            ),
            RoleProblem::Unseparated => write!(
                f,
                "claim `{claim}` is one text, which is no name of a role: SVC_OIDC_ROLE_SEPARATOR names what separates several, \
                 SVC_OIDC_ROLE_MAPPING which names grant a role"
            ),
            RoleProblem::Unmapped(entries) => write!(
                f,
                "no entry of claim `{claim}` grants a role ({entries} in all): SVC_OIDC_ROLE_MAPPING names those of the provider that do"
            ),
            RoleProblem::Unreadable(entries) => write!(
                f,
                "entries of claim `{claim}` that cannot be read grant nothing ({entries} in all): an entry is a name, or an object of one of the \
                 forms on the page about the identity provider"
            ),
        }
    }
}

/// What was found of a claim.
#[derive(Default)]
struct Entries {
    granted: BTreeSet<TokenRole>,
    named: usize,
    unreadable: usize,
}

impl RoleRules {
    /// Reads the claim at this path. A token is of bounded length, and so are its entries.
    pub(super) fn read(&self, claims: &Map<String, Value>, claim: &str) -> RoleReading {
        let mut entries = Entries::default();
        let mut problem = None;
        match at(claims, claim) {
            None | Some(Value::Null) if is_left_out(claims, claim) => problem = Some(RoleProblem::LeftOut),
            None | Some(Value::Null) => problem = Some(RoleProblem::Missing),
            Some(Value::Array(listed)) => {
                for entry in listed {
                    self.count(name_of(entry), &mut entries);
                }
            }
            Some(Value::Object(granted)) => {
                for (name, grantors) in granted {
                    self.count(is_granted(grantors).then_some(name.as_str()), &mut entries);
                }
            }
            Some(Value::String(text)) => match self.separator_of(claim) {
                Some(separator) => {
                    for name in text.split(separator).map(str::trim).filter(|name| !name.is_empty()) {
                        self.count(Some(name), &mut entries);
                    }
                }
                None => self.count(Some(text), &mut entries),
            },
            Some(other @ (Value::Bool(_) | Value::Number(_))) => problem = Some(RoleProblem::OfKind(kind_of(other))),
        }
        let problem = problem.or_else(|| {
            let is_one_text = matches!(at(claims, claim), Some(Value::String(_))) && self.separator_of(claim).is_none();
            match (entries.granted.is_empty(), entries.unreadable) {
                (_, unreadable @ 1..) => Some(RoleProblem::Unreadable(unreadable)),
                (true, 0) if entries.named == 0 => None,
                (true, 0) if is_one_text => Some(RoleProblem::Unseparated),
                (true, 0) => Some(RoleProblem::Unmapped(entries.named)),
                (false, 0) => None,
            }
        });
        let remark = problem.map(|problem| RoleRemark { claim: claim.to_owned(), problem });
        RoleReading { granted: entries.granted, remark }
    }

    fn count(&self, name: Option<&str>, entries: &mut Entries) {
        match name {
            Some(name) => {
                entries.named += 1;
                entries.granted.extend(self.mapping.get(name).into_iter().flatten());
            }
            None => entries.unreadable += 1,
        }
    }

    /// Only what is configured, or a list of scopes, is separated: a name may have blanks, and `not admin` is not `admin`.
    fn separator_of(&self, claim: &str) -> Option<char> {
        self.separator.or_else(|| SCOPE_CLAIMS.contains(&claim).then_some(' '))
    }
}

/// The name of an entry of a list: a text, or the `value` of an entry as SCIM has them (RFC 9068, section 2.2.3.1; RFC 7643, section 4.1.2).
fn name_of(entry: &Value) -> Option<&str> {
    entry.as_str().or_else(|| entry.get("value")?.as_str())
}

/// Whether a name of an object is a granted role: Zitadel has the organizations that grant it as its value,
/// `{"role": {"organization's id": "its domain"}}`. Other values, such as `false`, grant nothing.
fn is_granted(grantors: &Value) -> bool {
    grantors.as_object().is_some_and(|grantors| !grantors.is_empty() && grantors.values().all(Value::is_string))
}

/// Whether the provider has moved a claim out of the token (OpenID Connect Core 1.0, section 5.6.2).
fn is_left_out(claims: &Map<String, Value>, claim: &str) -> bool {
    let moved = claims.get("_claim_names").and_then(Value::as_object);
    moved.is_some_and(|moved| moved.contains_key(claim))
}

/// Writes remarks to the log, at most one a minute: a provider that leaves out a claim does so in every token.
#[derive(Debug, Default)]
pub(super) struct RemarkLog(Mutex<Option<Instant>>);

impl RemarkLog {
    pub(super) fn write(&self, remark: &RoleRemark) {
        let mut written_at = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if written_at.is_none_or(|at| at.elapsed() >= REMARK_GAP) {
            *written_at = Some(Instant::now());
            tracing::info!("roles in a valid token: {remark}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn granted(rules: &RoleRules, claim: &str, claims: &Value) -> (Vec<TokenRole>, Option<String>) {
        let reading = rules.read(claims.as_object().unwrap(), claim);
        (reading.granted.into_iter().collect(), reading.remark.map(|remark| remark.to_string()))
    }

    fn mapped(pairs: &[(&str, TokenRole)], separator: Option<char>) -> RoleRules {
        let mapping = pairs.iter().map(|(name, role)| ((*name).to_owned(), [*role].into())).collect();
        RoleRules { separator, mapping }
    }

    const USER: TokenRole = TokenRole::User;
    const ADMIN: TokenRole = TokenRole::Admin;

    #[test]
    fn roles_are_read_in_every_form_that_providers_write() {
        let plain = RoleRules::default();
        let separated = |separator| RoleRules { separator: Some(separator), ..RoleRules::default() };
        let zitadel = json!({"admin": {"69234237810729019": "acme.example"}, "viewer": {"1": "a"}});
        for (what, rules, roles, expected) in [
            ("a list", &plain, json!(["user", "admin"]), vec![USER, ADMIN]),
            ("the same twice", &plain, json!(["user", "user"]), vec![USER]),
            ("a text", &plain, json!("admin"), vec![ADMIN]),
            ("an object of organizations", &plain, zitadel, vec![ADMIN]),
            ("entries of SCIM", &plain, json!([{"value": "user", "display": "User"}]), vec![USER]),
            ("blanks", &separated(' '), json!("user  admin "), vec![USER, ADMIN]),
            ("commas", &separated(','), json!("user, admin,"), vec![USER, ADMIN]),
            ("a list beside a separator", &separated(','), json!(["user", "x,admin"]), vec![USER]),
            ("one odd entry", &plain, json!([7, "admin", null, ["user"], {"name": "user"}]), vec![ADMIN]),
            ("an empty list", &plain, json!([]), vec![]),
            ("an empty text", &separated(' '), json!(""), vec![]),
        ] {
            assert_eq!(granted(rules, "roles", &json!({"roles": roles})).0, expected, "{what}");
        }
        let scopes = json!({"scope": "openid admin", "scp": ["openid", "user"]});
        assert_eq!(granted(&plain, "scope", &scopes).0, [ADMIN]);
        assert_eq!(granted(&plain, "scp", &scopes).0, [USER]);
    }

    #[test]
    fn nothing_but_the_exact_name_grants_a_role() {
        let plain = RoleRules::default();
        for roles in [
            json!("not admin"),
            json!("user,admin"),
            json!("Admin"),
            json!(" admin"),
            json!(["admin "]),
            json!(["ADMIN", "admins", "admin\u{0}", "\u{430}dmin"]),
            json!({"admin": false}),
            json!({"admin": true}),
            json!({"admin": {}}),
            json!({"admin": {"org": null}}),
            json!({"admin": {"roles": ["admin"]}}),
            json!({"admin": ["1"]}),
            json!([["admin"], {"admin": {}}, {"name": "admin"}]),
            json!(true),
            json!(1),
        ] {
            let (granted, remark) = granted(&plain, "roles", &json!({"roles": roles}));
            assert!(granted.is_empty() && remark.is_some(), "{roles}: {granted:?} {remark:?}");
        }
        // The object above the lists, as of a claim path that ends too early.
        let keycloak = json!({"resource_access": {"admin": {"roles": ["viewer"]}}});
        assert!(granted(&plain, "resource_access", &keycloak).0.is_empty());
    }

    #[test]
    fn mapping_grants_by_the_providers_names_alone() {
        let rules = mapped(&[("CN=GPU Admins,OU=Groups", ADMIN), ("7d8f1c2e", USER)], None);
        let claims = json!({"groups": ["admin", "user", "CN=GPU Admins,OU=Groups"]});
        assert_eq!(granted(&rules, "groups", &claims), (vec![ADMIN], None));
        assert_eq!(granted(&rules, "groups", &json!({"groups": ["admin", "7d8f1c2e"]})).0, [USER]);
        assert!(granted(&rules, "groups", &json!({"groups": ["admin", "user"]})).0.is_empty());
    }

    #[test]
    fn role_is_found_among_hundreds_of_groups() {
        let mut groups: Vec<String> = (0..400).map(|n| format!("group-{n}")).collect();
        groups.push("admin".to_owned());
        assert_eq!(granted(&RoleRules::default(), "groups", &json!({"groups": groups})), (vec![ADMIN], None));
    }

    #[test]
    fn remark_names_claim_and_setting_and_no_value() {
        let plain = RoleRules::default();
        let overage =
            json!({"_claim_names": {"groups": "src1"}, "_claim_sources": {"src1": {"endpoint": "https://graph"}}});
        for (claim, claims, parts) in [
            ("groups", json!({}), ["no claim `groups`", "SVC_OIDC_CLAIM_ROLES"]),
            ("groups", json!({"groups": null}), ["no claim `groups`", "SVC_OIDC_CLAIM_ROLES"]),
            ("groups", overage, ["`_claim_names`", "SVC_OIDC_CLAIM_ROLES"]),
            ("groups", json!({"groups": 7}), ["is a number", "SVC_OIDC_CLAIM_ROLES"]),
            ("groups", json!({"groups": "top secret"}), ["one text", "SVC_OIDC_ROLE_SEPARATOR"]),
            ("groups", json!({"groups": ["top secret"]}), ["(1 in all)", "SVC_OIDC_ROLE_MAPPING"]),
            ("groups", json!({"groups": ["admin", 7]}), ["(1 in all)", "cannot be read"]),
        ] {
            let remark = granted(&plain, claim, &claims).1.unwrap_or_default();
            assert!(parts.iter().all(|part| remark.contains(part)), "{claims}: {remark}");
            assert!(!remark.contains("secret") && remark.len() < 400, "{remark}");
        }
    }
}
