//! The certificates that the settings name, and their ends.

use super::{LOCAL, host};
use crate::config::installed_settings::{InstalledSettings, reached};
use crate::config::{NODE_LISTEN, PUBLIC_LISTEN, settings_table};
use crate::metrics::certificate_log::ENDS_SOON;
use chrono::{DateTime, Utc};
use edge::tls::certificate_validity::{CertificateValidity, accepts, validities};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use std::io::Read as _;
use std::net::SocketAddr;
use std::sync::Arc;
use telemetry::diagnosis::DiagnosticFinding;

/// A bundle of all public authorities has a quarter of this.
const MOST_BYTES: u64 = 1 << 20;

const CHAIN: &str = "SVC_TLS_CERT_PATH";
const AUTHORITIES: &str = "SVC_TLS_CA_PATH";
/// The listener of webhooks may be a plain one, behind a proxy.
const TLS_LISTENERS: [&str; 2] = [PUBLIC_LISTEN.0, NODE_LISTEN.0];

pub(super) fn examine(settings: &InstalledSettings) -> Vec<DiagnosticFinding> {
    let now = Utc::now();
    let is_one = |name: &&str| *name == CHAIN || name.ends_with("_CA_PATH");
    let mut names: Vec<_> = settings_table::names().filter(is_one).collect();
    names.sort_unstable();
    names.dedup();
    let mut findings = Vec::new();
    for name in names {
        let Some(path) = settings.get(name) else { continue };
        let read = read(&path).and_then(|pem| validities(&pem).map_err(|error| error.to_string()));
        match read {
            Ok(certificates) => findings.push(judge_file(name, &path, &certificates, now)),
            Err(why) => findings.push(DiagnosticFinding::error(
                format!("{name}: {path} cannot be used: {why}"),
                "put the certificates there, PEM; run this command as root where the file is root's",
            )),
        }
    }
    findings.extend(examine_names(settings, now));
    findings
}

fn read(path: &str) -> Result<String, String> {
    let mut text = String::new();
    let file = std::fs::File::open(path).and_then(|file| file.take(MOST_BYTES).read_to_string(&mut text));
    file.map(|_| text).map_err(|error| error.to_string())
}

/// A chain is valid while all of its certificates are, a list of authorities while one is.
fn judge_file(name: &str, path: &str, certificates: &[CertificateValidity], now: DateTime<Utc>) -> DiagnosticFinding {
    let is_chain = name == CHAIN;
    let first = certificates.iter().min_by_key(|it| it.ends_at);
    let last = certificates.iter().max_by_key(|it| it.ends_at);
    let Some(judged) = (if is_chain { first } else { last }) else {
        return DiagnosticFinding::error(format!("{name}: {path} has no certificate"), "put one there, PEM");
    };
    let CertificateValidity { subject, begins_at, ends_at } = judged;
    let (begins, ends) = (begins_at.format("%Y-%m-%d %H:%M UTC"), ends_at.format("%Y-%m-%d %H:%M UTC"));
    let renew = match is_chain {
        true => "renew it, replace the file, and run `systemctl reload gpuaas`",
        false => {
            "take the current authorities from the issuer of that server's certificate, replace the file, and restart the service"
        }
    };
    if *ends_at <= now {
        return DiagnosticFinding::error(format!("{name}: {path} ({subject}) ended at {ends}"), renew);
    }
    if *begins_at > now {
        let summary = format!("{name}: {path} ({subject}) is valid from {begins} on, which is in the future");
        return DiagnosticFinding::error(
            summary,
            "check this machine's clock; otherwise use the certificate of before",
        );
    }
    let days = (*ends_at - now).num_days();
    if *ends_at - now < ENDS_SOON {
        return DiagnosticFinding::warning(format!("{name}: {path} ({subject}) ends in {days} days, at {ends}"), renew);
    }
    let ended = certificates.iter().filter(|it| it.ends_at <= now).count();
    let also = if ended == 0 { String::new() } else { format!("; {ended} other authorities in it have ended") };
    DiagnosticFinding::ok(format!("{name}: {path} ({subject}) ends in {days} days, at {ends}{also}"))
}

/// Whether agents, which trust the configured authorities alone, accept the certificate for the node API's address, and users' programs for
/// that of the public API.
fn examine_names(settings: &InstalledSettings, now: DateTime<Utc>) -> Vec<DiagnosticFinding> {
    let file = |name| settings.get(name).and_then(|path| read(&path).ok());
    let (Some(chain), Some(authorities)) = (file(CHAIN), file(AUTHORITIES)) else { return Vec::new() };
    // Behind proxies, their certificate is presented.
    let nodes_see_it = settings.get("SVC_NODE_CLIENT_IDENTITY").is_none_or(|way| way == "tls");
    let users_see_it = settings.get("SVC_TRUSTED_PROXIES").is_none();
    [("SVC_NODE_PUBLIC_URL", "agents", nodes_see_it), ("SVC_PUBLIC_URL", "users", users_see_it)]
        .into_iter()
        .filter(|(.., is_seen)| *is_seen)
        .filter_map(|(name, clients, _)| {
            let host = reqwest::Url::parse(&settings.get(name)?).ok()?.host_str()?.to_owned();
            let accepted = accepts(&authorities, &chain, &host, now);
            let accepted = accepted.map_err(|error| anyhow::Error::from(error).root_cause().to_string());
            Some(judge_acceptance(clients, name, &host, accepted))
        })
        .collect()
}

fn judge_acceptance(clients: &str, setting: &str, host: &str, accepted: Result<(), String>) -> DiagnosticFinding {
    match accepted {
        Ok(()) => DiagnosticFinding::ok(format!("{clients} accept the server certificate for {host}")),
        Err(why) => DiagnosticFinding::error(
            format!("{clients} refuse the server certificate for {host}, the host of {setting}: {why}"),
            format!(
                "use a certificate that names {host} and is issued by an authority of SVC_TLS_CA_PATH, with its intermediates in SVC_TLS_CERT_PATH"
            ),
        ),
    }
}

/// Whether the listeners of the running service present the certificate that is in the file: a renewed one is taken up by a reload.
pub(super) async fn examine_presented(settings: Arc<InstalledSettings>) -> Vec<DiagnosticFinding> {
    let listeners = host::listeners(&settings).into_iter().filter(|(name, _)| TLS_LISTENERS.contains(name));
    let Some(path) = settings.get(CHAIN) else { return Vec::new() };
    let file = path.clone();
    let read = tokio::task::spawn_blocking(move || read(&file)).await;
    let Some(Ok(pem)) = read.ok() else { return Vec::new() };
    let Some(Ok(leaf)) = CertificateDer::pem_slice_iter(pem.as_bytes()).next() else { return Vec::new() };
    let presented = listeners.map(|(name, address)| async move { (name, presented_at(reached(address)).await) });
    let presented = futures::future::join_all(presented).await;
    presented.into_iter().map(|(name, presented)| judge_presented(name, &path, &leaf, presented.as_deref())).collect()
}

/// The server's certificate; its issuer is not verified. `None` where nothing answers there by TLS.
async fn presented_at(address: SocketAddr) -> Option<Vec<u8>> {
    let client =
        reqwest::Client::builder().tls_danger_accept_invalid_certs(true).tls_info(true).timeout(LOCAL).no_proxy();
    let answer = client.build().ok()?.get(format!("https://{address}/api/v1/healthz")).send().await.ok()?;
    answer.extensions().get::<reqwest::tls::TlsInfo>()?.peer_certificate().map(<[u8]>::to_vec)
}

fn judge_presented(name: &str, path: &str, leaf: &[u8], presented: Option<&[u8]>) -> DiagnosticFinding {
    match presented {
        None => {
            DiagnosticFinding::ok(format!("{name}: nothing answers there by TLS, so that no certificate is compared"))
        }
        Some(presented) if presented == leaf => {
            DiagnosticFinding::ok(format!("{name} presents the certificate of {path}"))
        }
        Some(_) => DiagnosticFinding::warning(
            format!("{name} presents another certificate than that of {path}, as before it was renewed"),
            "systemctl reload gpuaas; in Kubernetes, replace the pods",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::TimeDelta;
    use telemetry::diagnosis::DiagnosticLevel;

    fn now() -> DateTime<Utc> {
        DateTime::from_timestamp(1_800_000_000, 0).unwrap()
    }

    fn certificate(from_days: i64, to_days: i64) -> CertificateValidity {
        let at = |days| now() + TimeDelta::days(days);
        CertificateValidity { subject: "CN=gpuaas".to_owned(), begins_at: at(from_days), ends_at: at(to_days) }
    }

    #[test]
    fn certificate_is_judged_by_its_end_and_its_begin() {
        let judge = |from, to| judge_file(CHAIN, "/tls.pem", &[certificate(from, to)], now());
        assert_eq!(judge(-100, 100).level, DiagnosticLevel::Ok);
        assert_eq!(judge(-100, 14).level, DiagnosticLevel::Ok);
        let soon = judge(-100, 13);
        assert!(soon.level == DiagnosticLevel::Warning && soon.summary.contains("ends in 13 days"), "{soon:?}");
        let ended = judge(-100, 0);
        assert!(ended.level == DiagnosticLevel::Error && ended.summary.contains("ended at 2027-01-15"), "{ended:?}");
        assert!(ended.action.unwrap().contains("systemctl reload gpuaas"));
        assert_eq!(judge(1, 100).level, DiagnosticLevel::Error);
    }

    #[test]
    fn chain_ends_with_its_first_certificate_and_a_list_of_authorities_with_its_last() {
        let both = [certificate(-100, 300), certificate(-100, -1)];
        assert_eq!(judge_file(CHAIN, "/tls.pem", &both, now()).level, DiagnosticLevel::Error);
        let authorities = judge_file("SVC_NATS_CA_PATH", "/ca.pem", &both, now());
        assert_eq!(authorities.level, DiagnosticLevel::Ok);
        assert!(authorities.summary.contains("1 other authorities in it have ended"), "{authorities:?}");
    }

    #[test]
    fn certificate_that_the_service_has_not_taken_up_is_a_warning_with_the_reload() {
        let judge = |presented| judge_presented("SVC_PUBLIC_LISTEN", "/tls.pem", b"leaf", presented);
        assert_eq!(judge(None).level, DiagnosticLevel::Ok);
        assert_eq!(judge(Some(&b"leaf"[..])).level, DiagnosticLevel::Ok);
        let before = judge(Some(&b"another"[..]));
        assert_eq!(before.level, DiagnosticLevel::Warning);
        assert!(before.action.unwrap().starts_with("systemctl reload gpuaas"));
    }

    #[test]
    fn certificate_that_agents_refuse_names_the_host() {
        let refused = judge_acceptance(
            "agents",
            "SVC_NODE_PUBLIC_URL",
            "nodes.example",
            Err("certificate not valid for name".to_owned()),
        );
        assert_eq!(refused.level, DiagnosticLevel::Error);
        assert!(refused.action.unwrap().contains("nodes.example"));
    }
}
