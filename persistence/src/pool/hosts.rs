//! The servers that a database URL names: one, or several as libpq writes them (`host1:5432,host2:5432`), of which one takes writes.

use super::{PoolConfig, PoolError};
use secrecy::ExposeSecret;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use std::str::FromStr;

/// The most servers of one URL.
const HOSTS_MAX: usize = 8;

/// How libpq names the choice that is made here, and its newer name for the same.
const TARGET: &str = "target_session_attrs";
const TARGETS: [&str; 2] = ["read-write", "primary"];

/// The options of each server that the URL names, in its order; at least one.
///
/// # Errors
/// [`PoolError`] where the URL is malformed, or a server of it could not be verified.
pub(super) fn options_of_hosts(config: &PoolConfig) -> Result<Vec<PgConnectOptions>, PoolError> {
    let urls = urls_of_hosts(config.url.expose_secret())?;
    urls.iter().map(|url| options(url, config)).collect()
}

fn options(url: &str, config: &PoolConfig) -> Result<PgConnectOptions, PoolError> {
    let options = PgConnectOptions::from_str(url).map_err(|_| PoolError::Url)?;
    // It changes nothing since Postgres 12, and poolers refuse it.
    let options = options.application_name(&config.application_name).extra_float_digits(None::<i8>);
    match &config.ca {
        Some(ca) => Ok(options.ssl_mode(PgSslMode::VerifyFull).ssl_root_cert(ca)),
        None if is_local(&options) => Ok(options),
        None => Err(PoolError::Unverified { host: options.get_host().to_owned() }),
    }
}

fn is_local(options: &PgConnectOptions) -> bool {
    let host = options.get_host();
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    options.get_socket().is_some()
        || host.starts_with('/')
        || host == "localhost"
        || address.is_ok_and(|address| address.is_loopback())
}

/// A URL for each host of the authority. The client library knows URLs of one host alone.
fn urls_of_hosts(url: &str) -> Result<Vec<String>, PoolError> {
    let Some((scheme, rest)) = url.split_once("://") else { return Ok(vec![url.to_owned()]) };
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (user, hosts) = authority.rsplit_once('@').map_or(("", authority), |(user, hosts)| (user, hosts));
    let tail = without_target(tail)?;
    let hosts: Vec<&str> = hosts.split(',').collect();
    if hosts.len() > HOSTS_MAX {
        return Err(PoolError::Hosts { count: hosts.len() });
    }
    if hosts.len() > 1 && hosts.iter().any(|host| host.is_empty()) {
        return Err(PoolError::Url);
    }
    let at = if user.is_empty() { "" } else { "@" };
    Ok(hosts.into_iter().map(|host| format!("{scheme}://{user}{at}{host}{tail}")).collect())
}

/// The path and the query of a URL without the parameter that the library does not know.
fn without_target(tail: &str) -> Result<String, PoolError> {
    let Some((path, query)) = tail.split_once('?') else { return Ok(tail.to_owned()) };
    let mut parameters = Vec::new();
    for parameter in query.split('&') {
        match parameter.split_once('=') {
            Some((TARGET, target)) if TARGETS.contains(&target) => {}
            Some((TARGET, target)) => return Err(PoolError::Target { target: target.chars().take(32).collect() }),
            Some(_) | None => parameters.push(parameter),
        }
    }
    Ok(if parameters.is_empty() { path.to_owned() } else { format!("{path}?{}", parameters.join("&")) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn read(url: &str, ca: Option<&str>) -> Result<Vec<PgConnectOptions>, PoolError> {
        options_of_hosts(&PoolConfig::new(url.into(), ca.map(PathBuf::from)))
    }

    #[test]
    fn url_of_several_hosts_is_read_as_libpq_reads_it() {
        let url = "postgres://u:p%40%2Cw@one.example:5433,two.example,[::1]:5434/db?target_session_attrs=read-write&sslmode=disable";
        let options = read(url, Some("/ca.pem")).unwrap();
        let hosts: Vec<_> = options.iter().map(|options| (options.get_host(), options.get_port())).collect();
        assert_eq!(hosts, [("one.example", 5433), ("two.example", 5432), ("[::1]", 5434)]);
        for options in &options {
            assert_eq!((options.get_username(), options.get_database()), ("u", Some("db")));
            assert!(matches!(options.get_ssl_mode(), PgSslMode::VerifyFull));
        }
    }

    #[test]
    fn every_host_is_verified_and_their_number_is_bounded() {
        let mixed = read("postgres://u@127.0.0.1,db.example/x", None).unwrap_err();
        assert!(matches!(&mixed, PoolError::Unverified { host } if host == "db.example"));
        let many = ["127.0.0.1"; HOSTS_MAX + 1].join(",");
        assert!(matches!(read(&format!("postgres://u@{many}/x"), None), Err(PoolError::Hosts { count: 9 })));
        assert!(matches!(read("postgres://u@127.0.0.1,,127.0.0.1/x", None), Err(PoolError::Url)));
    }

    #[test]
    fn server_that_need_not_take_writes_is_no_target() {
        for accepted in ["read-write", "primary"] {
            assert!(read(&format!("postgres://u@127.0.0.1,[::1]/x?target_session_attrs={accepted}"), None).is_ok());
        }
        let refused = read("postgres://u@127.0.0.1,[::1]/x?target_session_attrs=prefer-standby", None).unwrap_err();
        assert!(
            refused.to_string().contains("prefer-standby") && refused.to_string().contains("read-write"),
            "{refused}"
        );
    }

    #[test]
    fn remote_host_without_tls_is_refused() {
        let refused = read("postgres://u:secret@db.example/x?sslmode=disable", None).unwrap_err();
        assert!(matches!(&refused, PoolError::Unverified { host } if host == "db.example"));
        let verified = read("postgres://u:secret@db.example/x?sslmode=disable", Some("/ca.pem")).unwrap();
        assert!(matches!(verified[0].get_ssl_mode(), PgSslMode::VerifyFull));
    }

    #[test]
    fn socket_and_loopback_need_no_certificate_authority() {
        for url in ["postgres://u@127.0.0.1/x", "postgres://u@[::1]/x", "postgres:///x?host=/run/postgresql"] {
            assert!(read(url, None).is_ok(), "{url}");
        }
    }

    #[test]
    fn a_bad_url_is_refused_without_quoting_it() {
        let error = read("postgres//u:hunter2@x", None).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"));
    }
}
