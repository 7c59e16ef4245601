//! The settings that say where a provider's tokens have what this service needs. A setting that no token can satisfy is refused at the start.

use crate::config::variables::{Variables, items};
use domain::authz::TokenRole;
use edge::auth::claims::ClaimPaths;
use edge::auth::role_claims::{RoleRules, TOKEN_ROLES};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

const USER_ID: &str = "SVC_OIDC_CLAIM_USER_ID";
const ROLE_MAPPING: &str = "SVC_OIDC_ROLE_MAPPING";
const ROLE_SEPARATOR: &str = "SVC_OIDC_ROLE_SEPARATOR";

/// Registered claims (RFC 7519, section 4.1) that name no user: they are the same for all users, or another one in each token.
const NO_USER: [&str; 6] = ["iss", "aud", "exp", "nbf", "iat", "jti"];

/// The longest path, in bytes.
const MAX_PATH_LEN: usize = 255;

/// Names of separators that an environment file would lose or that are easily misread.
const SEPARATORS: [(&str, char); 3] = [("space", ' '), ("comma", ','), ("semicolon", ';')];

/// Replaces the paths that are configured.
pub(super) fn paths(variables: &mut Variables<'_>, claims: &mut ClaimPaths) {
    for (name, path) in [
        ("SVC_OIDC_CLAIM_AUDIENCE", &mut claims.audience),
        (USER_ID, &mut claims.user_id),
        ("SVC_OIDC_CLAIM_ROLES", &mut claims.roles),
        ("SVC_OIDC_CLAIM_ORG_ID", &mut claims.org_id),
        ("SVC_OIDC_CLAIM_PROJECT_ID", &mut claims.project_id),
        ("SVC_OIDC_CLAIM_PLAN", &mut claims.plan),
    ] {
        let Some(configured) = variables.optional(name) else { continue };
        if !is_path(&configured) {
            variables.wrong(format!(
                "{name} is {configured:?}; it must be the name of one claim, or the path to it with dots, for example {path}"
            ));
        }
        *path = configured;
    }
    let user_id = claims.user_id.as_str();
    if NO_USER.contains(&user_id) {
        let problem =
            format!("{USER_ID} is {user_id:?}, which names no user; it must be a claim such as sub, oid or uid");
        variables.wrong(problem);
    }
}

/// Whether a token may have such a claim.
fn is_path(path: &str) -> bool {
    // What belongs to another language for paths (JSON Pointer, JSONPath), or to a list of several.
    let is_foreign = |c: char| c.is_control() || matches!(c, '"' | '\'' | '[' | ']' | '{' | '}' | ',' | '*' | '$');
    let is_below_a_value =
        NO_USER.iter().chain(&["sub"]).any(|claim| path.strip_prefix(claim).is_some_and(|rest| rest.starts_with('.')));
    path.len() <= MAX_PATH_LEN
        && path.trim() == path
        && !path.contains(is_foreign)
        && !path.starts_with(['/', '.'])
        && !path.ends_with('.')
        && !path.contains("..")
        && !is_below_a_value
}

/// How roles are read.
pub(super) fn roles(variables: &mut Variables<'_>) -> RoleRules {
    let mut rules = RoleRules { separator: separator(variables), ..RoleRules::default() };
    if let Some(text) = variables.optional(ROLE_MAPPING) {
        match mapping(&text) {
            Ok(mapping) => rules.mapping = mapping,
            Err(why) => variables.wrong(format!(
                "{ROLE_MAPPING} {why}; it must be NAME=ROLE, several with commas, where NAME is the provider's and ROLE is user or admin, for \
                 example gpu-admins=admin,gpu-users=user; names with commas as JSON, {{\"CN=GPU Admins,OU=Groups\": \"admin\"}}"
            )),
        }
    }
    rules
}

/// A blank separator is a mistake: a blank is written as its name.
fn separator(variables: &mut Variables<'_>) -> Option<char> {
    let text = variables.assigned(ROLE_SEPARATOR)?;
    let named = SEPARATORS.iter().find(|(name, _)| *name == text.trim()).map(|(_, separator)| *separator);
    let mut signs = text.trim().chars();
    let one = signs.next().filter(|sign| sign.is_ascii_punctuation() && signs.next().is_none());
    let separator = named.or(one);
    if separator.is_none() {
        variables.wrong(format!(
            "{ROLE_SEPARATOR} is {text:?}; it must be `space`, `comma`, `semicolon`, or one sign that no role's name has, for example |"
        ));
    }
    separator
}

/// The roles by the provider's names, or what is wrong with the text.
fn mapping(text: &str) -> Result<BTreeMap<String, BTreeSet<TokenRole>>, String> {
    let pairs = if text.trim_start().starts_with('{') { from_json(text)? } else { from_list(text)? };
    if pairs.is_empty() {
        return Err("names no role, so that no user would have one".to_owned());
    }
    let mut mapping: BTreeMap<String, BTreeSet<TokenRole>> = BTreeMap::new();
    for (name, role) in pairs {
        if name.is_empty() {
            return Err(format!("gives the role {role:?} to an empty name"));
        }
        let known = TOKEN_ROLES.iter().find(|(known, _)| *known == role);
        let (_, role) = known.ok_or_else(|| format!("gives {name:?} the role {role:?}, which does not exist"))?;
        mapping.entry(name).or_default().insert(*role);
    }
    Ok(mapping)
}

fn from_list(text: &str) -> Result<Vec<(String, String)>, String> {
    let pair = |item: &String| {
        let (name, role) = item.rsplit_once('=').ok_or_else(|| format!("has {item:?}, which gives no role"))?;
        Ok((name.trim().to_owned(), role.trim().to_owned()))
    };
    items(text).iter().map(pair).collect()
}

/// An object with a role, or a list of roles, for each name.
fn from_json(text: &str) -> Result<Vec<(String, String)>, String> {
    let object: Map<String, Value> =
        strict_json::from_str(text).map_err(|error| format!("is no JSON object: {error}"))?;
    let mut pairs = Vec::new();
    for (name, roles) in object {
        let roles = match roles {
            Value::Array(roles) => roles,
            role => vec![role],
        };
        for role in roles {
            let role = role.as_str().ok_or_else(|| format!("gives {name:?} a role that is no text"))?;
            pairs.push((name.clone(), role.to_owned()));
        }
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::variables::{ConfigError, read_from};

    fn read(settings: &[(&str, &str)]) -> Result<(ClaimPaths, RoleRules), ConfigError> {
        read_from(settings, |variables| {
            let mut claims = ClaimPaths::default();
            paths(variables, &mut claims);
            (claims, roles(variables))
        })
    }

    fn role_rules(name: &str, value: &str) -> RoleRules {
        read(&[(name, value)]).unwrap().1
    }

    #[test]
    fn claims_are_named_as_providers_name_them() {
        for path in [
            "roles",
            "realm_access.roles",
            "resource_access.my.client.roles",
            "cognito:groups",
            "https://gpu.example/roles",
            "urn:zitadel:iam:org:project:roles",
            "my roles",
            "aud_x.roles",
        ] {
            assert_eq!(read(&[("SVC_OIDC_CLAIM_ROLES", path)]).unwrap().0.roles, path);
        }
        assert_eq!(read(&[("SVC_OIDC_CLAIM_AUDIENCE", "client_id")]).unwrap().0.audience, "client_id");
    }

    #[test]
    fn path_that_no_token_has_is_refused_with_the_form_that_is_needed() {
        for path in [
            "$.roles",
            "$['roles']",
            "/realm_access/roles",
            "realm_access..roles",
            ".roles",
            "roles.",
            "roles[0]",
            "roles[*]",
            "roles,groups",
            "\"roles\"",
            " roles",
            "{roles}",
            "sub.roles",
            "aud.roles",
            &"x".repeat(256),
        ] {
            let error = read(&[("SVC_OIDC_CLAIM_ROLES", path)]).unwrap_err().to_string();
            assert!(error.contains("SVC_OIDC_CLAIM_ROLES") && error.contains("realm_access.roles"), "{path}: {error}");
        }
        for path in NO_USER {
            assert!(read(&[(USER_ID, path)]).unwrap_err().to_string().contains(USER_ID), "{path}");
        }
    }

    #[test]
    fn separator_is_a_sign_or_the_name_of_one() {
        for (text, sign) in [("space", ' '), ("comma", ','), ("semicolon", ';'), ("|", '|'), (" ; ", ';'), (", ", ',')]
        {
            assert_eq!(role_rules(ROLE_SEPARATOR, text).separator, Some(sign), "{text:?}");
        }
        assert_eq!(read(&[]).unwrap().1, RoleRules::default());
        for text in ["", " ", "\t", "x", "7", "||", "spaces", "é"] {
            let error = read(&[(ROLE_SEPARATOR, text)]).unwrap_err().to_string();
            assert!(error.contains(ROLE_SEPARATOR) && error.contains("`space`"), "{text:?}: {error}");
        }
    }

    #[test]
    fn mapping_is_a_list_or_json_and_replaces_the_names_of_this_service() {
        let (user, admin) = (BTreeSet::from([TokenRole::User]), BTreeSet::from([TokenRole::Admin]));
        let both = BTreeSet::from([TokenRole::User, TokenRole::Admin]);
        let list = role_rules(ROLE_MAPPING, "gpu-admins=admin, a=b=user ,gpu-admins=user");
        assert_eq!(list.mapping, [("a=b".to_owned(), user.clone()), ("gpu-admins".to_owned(), both.clone())].into());
        let json = role_rules(ROLE_MAPPING, r#"{"CN=GPU Admins,OU=Groups": "admin", "x": ["user", "admin"]}"#);
        assert_eq!(json.mapping, [("CN=GPU Admins,OU=Groups".to_owned(), admin), ("x".to_owned(), both)].into());
        assert_eq!(RoleRules::default().mapping.get("user"), Some(&user));
    }

    #[test]
    fn mapping_that_grants_no_role_is_refused_with_the_form_that_is_needed() {
        for text in [
            " , ",
            "admin",
            "gpu-admins=administrator",
            "gpu-admins=Admin",
            "gpu-admins=",
            "=admin",
            "gpu-admins:admin",
            "CN=GPU Admins,OU=Groups=admin",
            "{}",
            "{\"x\": []}",
            "{\"x\": 1}",
            "{\"x\": \"root\"}",
            "{\"x\": [\"user\", null]}",
            "{\"x\": \"admin\"",
            "{\"\": \"admin\"}",
        ] {
            let error = read(&[(ROLE_MAPPING, text)]).unwrap_err().to_string();
            assert!(
                error.contains(ROLE_MAPPING) && error.contains("gpu-admins=admin,gpu-users=user"),
                "{text}: {error}"
            );
        }
    }
}
