//! How this service would read an access token: for an operator who sets the identity provider up, with a token of their own.

use super::outside_services::provider_keys;
use crate::config::installed_settings::InstalledSettings;
use chrono::Utc;
use domain::authz::TokenRole;
use edge::auth::claims::ClaimPaths;
use edge::auth::role_claims::TOKEN_ROLES;
use edge::auth::{Authenticator, TokenReport};
use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use telemetry::diagnosis::DiagnosticFinding;

/// More than the longest token, in bytes.
const MAX_BYTES: u64 = 64 * 1024;

const PAGE: &str = "correct the setting, or the client at the identity provider; the page about the identity provider says what each of them needs";

pub(super) async fn examine(settings: Arc<InstalledSettings>, file: PathBuf) -> Vec<DiagnosticFinding> {
    let token = match token_of(&file) {
        Ok(token) => token,
        Err(error) => {
            let action = "name a file with one access token and nothing else";
            return vec![DiagnosticFinding::error(format!("{} cannot be read: {error}", file.display()), action)];
        }
    };
    let rules = settings.outside_services().identity.rules;
    let authenticator = match provider_keys(&settings, &rules.issuer) {
        Ok(jwks) => Authenticator::new(rules, jwks),
        Err(error) => return vec![DiagnosticFinding::error(error.to_string(), "correct SVC_OIDC_ISSUER")],
    };
    let report = authenticator.report(&token, Utc::now()).await;
    judge(&report, authenticator.claim_paths())
}

fn token_of(file: &Path) -> std::io::Result<String> {
    let mut token = String::new();
    std::fs::File::open(file)?.take(MAX_BYTES).read_to_string(&mut token)?;
    Ok(token)
}

fn judge(report: &TokenReport, paths: &ClaimPaths) -> Vec<DiagnosticFinding> {
    let mut findings = Vec::new();
    if !report.claims.is_empty() {
        findings.push(DiagnosticFinding::ok(format!("the token has {}", report.claims.join(", "))));
    }
    let caller = match &report.verdict {
        Ok(caller) => caller,
        Err(fault) => {
            findings.push(DiagnosticFinding::error(format!("the token is refused: {fault}"), PAGE));
            return findings;
        }
    };
    findings
        .push(DiagnosticFinding::ok(format!("the user id is {:?}, by claim `{}`", &*caller.user_id, paths.user_id)));
    for (what, value, claim) in [
        ("organization", caller.org_id.as_deref(), &paths.org_id),
        ("project", caller.project_id.as_deref(), &paths.project_id),
        ("plan", caller.plan.as_deref(), &paths.plan),
    ] {
        let value = value.map_or_else(|| "none".to_owned(), |value| format!("{value:?}"));
        findings.push(DiagnosticFinding::ok(format!("the {what} is {value}, by claim `{claim}`")));
    }
    if !caller.roles.is_empty() {
        let roles = names_of(&caller.roles);
        findings.push(DiagnosticFinding::ok(format!("the roles are {roles}, by claim `{}`", paths.roles)));
    }
    match &report.remark {
        Some(remark) => findings.push(DiagnosticFinding::warning(remark.to_string(), PAGE)),
        None if caller.roles.is_empty() => {
            findings.push(DiagnosticFinding::warning(
                format!("claim `{}` is empty: the token grants no role", paths.roles),
                PAGE,
            ));
        }
        None => {}
    }
    findings
}

fn names_of(roles: &BTreeSet<TokenRole>) -> String {
    let names = TOKEN_ROLES.iter().filter(|(_, role)| roles.contains(role)).map(|(name, _)| *name);
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use local_servers::identity::IdentityProvider;
    use secrecy::ExposeSecret as _;
    use serde_json::{Value, json};
    use telemetry::diagnosis::DiagnosticLevel;

    /// The findings on a token with changed claims, as text.
    async fn findings(provider: &IdentityProvider, change: impl FnOnce(&mut Value)) -> Vec<(DiagnosticLevel, String)> {
        let folder = tempfile::tempdir().unwrap();
        let mut claims = provider.claims_of("admin").unwrap();
        change(&mut claims);
        let file = folder.path().join("token");
        std::fs::write(&file, format!("{}\n", provider.mint(&claims).unwrap().expose_secret())).unwrap();
        of_file(provider, &folder.path().join("gpuaas.env"), file).await
    }

    async fn of_file(provider: &IdentityProvider, env: &Path, token: PathBuf) -> Vec<(DiagnosticLevel, String)> {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let audience = local_servers::identity::AUDIENCE;
        std::fs::write(env, format!("SVC_OIDC_ISSUER={}\nSVC_OIDC_AUDIENCE={audience}\n", provider.issuer())).unwrap();
        let settings = Arc::new(InstalledSettings::open(Some(env)));
        examine(settings, token).await.into_iter().map(|finding| (finding.level, finding.summary)).collect()
    }

    #[tokio::test]
    async fn token_is_shown_as_the_service_reads_it() {
        let provider = IdentityProvider::start().await.unwrap();
        let user_id = provider.person("admin").unwrap().id;
        let found = findings(&provider, |claims| claims["plan"] = json!("gold")).await;
        assert!(found.iter().all(|(level, _)| *level == DiagnosticLevel::Ok), "{found:#?}");
        for part in [
            "`sub`".to_owned(),
            user_id.to_string(),
            "realm_access (an object)".to_owned(),
            "the roles are user, admin, by claim `realm_access.roles`".to_owned(),
            "the plan is \"gold\", by claim `plan`".to_owned(),
            format!("aud = \"{}\"", local_servers::identity::AUDIENCE),
        ] {
            assert!(found.iter().any(|(_, summary)| summary.contains(&part)), "{part} in {found:#?}");
        }
    }

    #[tokio::test]
    async fn refused_token_and_token_without_a_role_name_claim_and_setting() {
        let provider = IdentityProvider::start().await.unwrap();
        for (level, parts, found) in [
            (
                DiagnosticLevel::Error,
                ["claim `aud`", "SVC_OIDC_AUDIENCE"],
                findings(&provider, |claims| claims["aud"] = json!("account")).await,
            ),
            (
                DiagnosticLevel::Warning,
                ["no claim `realm_access.roles`", "SVC_OIDC_CLAIM_ROLES"],
                findings(&provider, |claims| claims["realm_access"] = json!({})).await,
            ),
            (
                DiagnosticLevel::Warning,
                ["`realm_access.roles` is empty", "no role"],
                findings(&provider, |claims| claims["realm_access"] = json!({"roles": []})).await,
            ),
        ] {
            let last = found.last().unwrap();
            assert!(last.0 == level && parts.iter().all(|part| last.1.contains(part)), "{found:#?}");
        }
        let folder = tempfile::tempdir().unwrap();
        let (env, missing) = (folder.path().join("gpuaas.env"), folder.path().join("token"));
        let found = of_file(&provider, &env, missing.clone()).await;
        assert!(found[0].0 == DiagnosticLevel::Error && found[0].1.contains("token cannot be read"), "{found:?}");
        std::fs::write(&missing, "ya29.opaque").unwrap();
        let found = of_file(&provider, &env, missing).await;
        assert!(found[0].1.contains("no signed JSON Web Token") && found.len() == 1, "{found:?}");
    }
}
