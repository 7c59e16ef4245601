//! The settings of `gpuaas serve`: all environment variables that it reads, with their meaning. `gpuaas config --check` knows names by it, and
//! the reference page `configuration.md` has it as its tables.

/// One or several variables with one meaning.
#[derive(Debug)]
pub struct Setting {
    pub names: &'static [&'static str],
    /// In Markdown.
    pub meaning: &'static str,
    /// What holds without it, in Markdown; empty in a section where all are optional together.
    pub unset: &'static str,
}

const fn setting(names: &'static [&'static str], meaning: &'static str, unset: &'static str) -> Setting {
    Setting { names, meaning, unset }
}

/// Settings under one heading of the page; without a title it continues the one before.
#[derive(Debug)]
pub struct Section {
    pub title: &'static str,
    pub intro: &'static str,
    /// The heading of the column with what holds without a setting; empty where there is none.
    pub unset: &'static str,
    pub settings: &'static [Setting],
}

/// What an OpenTelemetry collector's variables begin with: the exporter reads those that have no row.
const OPEN_TELEMETRY: &str = "OTEL_";

/// The beginnings of names that are the service's own. Not `NODE_` alone: variables of Node.js begin with it.
const OWN_PREFIXES: [&str; 6] = ["SVC_", "NODE_BOOTSTRAP_", "NODE_PROBE_", "INTERNAL_", "MAAS_", "GPUAAS_"];

/// Settings that name files with secrets, which their owner alone reads.
pub const SECRET_FILES: [&str; 7] = [
    "SVC_KEK_FILE",
    "SVC_TLS_KEY_PATH",
    "SVC_NODE_AGENT_PACKAGE_PULL_ACCOUNT_PATH",
    "SVC_ALERTMANAGER_PASSWORD_PATH",
    "SVC_ALERTMANAGER_TOKEN_PATH",
    "SVC_LOG_STORE_PASSWORD_PATH",
    "SVC_LOG_STORE_TOKEN_PATH",
];

/// How many letters a name may differ from the one that was meant.
const LIKELY_TYPOS: usize = 3;

/// Every variable.
pub fn names() -> impl Iterator<Item = &'static str> {
    SECTIONS.iter().flat_map(|section| section.settings).flat_map(|setting| setting.names).copied()
}

/// Whether `gpuaas serve` reads it.
#[must_use]
pub fn is_known(name: &str) -> bool {
    name.starts_with(OPEN_TELEMETRY) || names().any(|known| known == name)
}

/// Why a name in a file of settings is probably a mistake. Names that are not like ours may be for other programs, and are none.
#[must_use]
pub fn mistake(name: &str) -> Option<String> {
    if is_known(name) {
        return None;
    }
    let closest = names().map(|known| (distance(name, known), known)).min();
    let meant = closest.filter(|(distance, known)| *distance <= LIKELY_TYPOS && *distance * 3 < known.len());
    match meant {
        Some((_, meant)) => Some(format!("{name} is no setting of `gpuaas serve`; did you mean {meant}?")),
        None => OWN_PREFIXES.iter().any(|prefix| name.starts_with(prefix)).then(|| {
            format!("{name} is no setting of `gpuaas serve`; remove it, or look for its name in configuration.md")
        }),
    }
}

/// The number of letters to insert, remove or replace (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (above, letter) in one.chars().enumerate() {
        let mut diagonal = above;
        let mut left = above + 1;
        if let Some(first) = row.first_mut() {
            *first = left;
        }
        for (cell, candidate) in row.iter_mut().skip(1).zip(&other) {
            let replaced = diagonal + usize::from(letter != *candidate);
            diagonal = *cell;
            left = replaced.min(left + 1).min(*cell + 1);
            *cell = left;
        }
    }
    row.last().copied().unwrap_or_default()
}

/// The tables of the reference page.
#[rustfmt::skip]
pub const SECTIONS: &[Section] = &[
    Section {
        title: "A replica",
        intro: "",
        unset: "where it is not set",
        settings: &[
            setting(&["SVC_DATABASE_URL"], "`postgres://…`; its user owns the database; [several servers](../operator/high-availability.md) as `host1:5432,host2:5432`", "required"),
            setting(&["SVC_DATABASE_CA_PATH"], "authorities of its certificate, PEM", "required for one that is not on this machine"),
            setting(&["SVC_MIGRATE_ON_START"], "`true`: its start [expands the schema](../operator/migrations.md); `false`: `gpuaas migrate` has done so before", "`false`; the Debian package's unit: `true`"),
            setting(&["SVC_NATS_URL"], "`tls://` or `nats://`, with credentials of [a user of the member's own, or of its Deployment](nats-permissions.md); several servers with commas", "required"),
            setting(&["SVC_NATS_STREAM_REPLICAS"], "copies of each stream [in a NATS cluster](../operator/high-availability.md), from 1 to 5 and at most its servers", "`1`"),
            setting(&["SVC_NATS_CA_PATH"], "authorities of its certificate, PEM; with it the link is TLS", "the system's"),
            setting(&["SVC_KEK_FILE"], "[the key ring](../operator/keys.md) that seals secrets at rest", "required"),
            setting(&["SVC_UNSEALED_SNAPSHOTS_UNTIL"], "until when stored snapshots without a seal are accepted, while a release that does not seal still runs ([how to upgrade](../decisions/0033-snapshots-are-sealed-by-their-member.md))", "never"),
            setting(&["SVC_PUBLIC_URL"], "where users reach the public API and the console, at the root of their host: `https://gpu.example:8443`", "required"),
            setting(&["SVC_PUBLIC_LISTEN"], "where a replica serves it", "`0.0.0.0:8443`"),
            setting(&["SVC_NODE_PUBLIC_URL"], "where agents reach the node API, always `https://`", "required"),
            setting(&["SVC_NODE_LISTEN"], "where a replica serves it, over mutual TLS", "`0.0.0.0:9443`"),
            setting(&["SVC_TRUSTED_PROXIES"], "HTTP proxies in front of the public API and the webhook, by their own addresses, as networks with commas: the client is what their header names", "none"),
            setting(&["SVC_CLIENT_ADDRESS_HEADER"], "the header in which those proxies, and those of the node API, [name the client](../operator/proxies.md#which-client): `x-forwarded-for` or `forwarded` (RFC 7239)", "`x-forwarded-for`"),
            setting(&["SVC_TCP_BALANCERS"], "balancers in front of any listener that pass TLS through, likewise: bounds per address do not hold for their connections", "none"),
            setting(&["SVC_LISTENER_CONNECTIONS"], "the connections that the public API and the node API each admit at once, from 64 to 1000000; further ones wait in the kernel. Half of them may be without a request, or of one address. Each takes a file descriptor ([capacity](../operator/capacity.md))", "`16384`"),
            setting(&["SVC_HSTS_SECONDS"], "for how many seconds browsers reach the host of the public URL by HTTPS alone, on all of its ports (`Strict-Transport-Security`, RFC 6797), from 0 to 63072000, such as 31536000, a year; with `0` they forget it", "not sent"),
            setting(&["SVC_TLS_CERT_PATH", "SVC_TLS_KEY_PATH"], "the certificate chain of all listeners and its key, PEM, read at the start and [at a reload](../operator/install.md#change-settings)", "required"),
            setting(&["SVC_TLS_CA_PATH"], "by which agents verify it, PEM", "required"),
            setting(&["SVC_TERMINAL_URL"], "where [terminals](../user/terminals.md) connect, with the path `/ws/v1/terminal` at its end: `wss://terminals.example/ws/v1/terminal`", "the public URL's `wss://`"),
            setting(&["SVC_TERMINAL_ORIGINS"], "the origins of other pages that may open them, as `https://portal.example`, with commas", "none"),
            setting(&["SVC_ROLES"], "what this process does: `all`, or some of `api`, `node-api`, `terminal-gateway`, `entities`, `billing`, `provisioning`, `outbox-relay`, `notification-relay`, `webhook`, `node-log-gateway`, with commas", "`all`"),
            setting(&["SVC_MEMBER_NAME"], "its name in the tree and in logs", "the host's name and the process's number"),
            setting(&["SVC_ENV_FILE"], "files of settings in the format of systemd's `EnvironmentFile=`, with colons: [in a container](../operator/kubernetes.md), where no unit reads them. Later ones go before earlier ones, and all before the environment; `SVC_MEMBER_NAME`, `SVC_MIGRATE_ON_START`, `SVC_OPERATIONS_LISTEN` and `SVC_ROLES` with another value than in the environment are refused", "none"),
            setting(&["SVC_TRUST_DOMAIN"], "in the names of nodes' certificates (`spiffe://DOMAIN/…`); never change it", "`gpuaas`"),
            setting(&["NODE_PROBE_ALLOWED_CIDRS"], "the only networks in which a node's SSH port may be probed as it is registered, with commas", "all but those that no node has"),
            setting(&["NODE_BOOTSTRAP_TASK_SIGNING_PUBKEYS"], "the keys by which bundles have agents verify tasks, with commas", "the active one"),
        ],
    },
    Section {
        title: "The identity provider",
        intro: "[Chapter](../operator/identity-provider.md).",
        unset: "where it is not set",
        settings: &[
            setting(&["SVC_OIDC_ISSUER"], "the issuer, exactly as tokens name it in `iss`; HTTPS, or HTTP on this machine", "required"),
            setting(&["SVC_OIDC_AUDIENCE"], "what tokens must name in `aud`; several with commas, one of them is enough", "required"),
            setting(&["SVC_OIDC_CLAIM_AUDIENCE"], "the claim that names it, where the provider's access tokens have no `aud`", "`aud`"),
            setting(&["SVC_OIDC_CLAIM_USER_ID"], "the claim with the user's id", "`sub`"),
            setting(&["SVC_OIDC_CLAIM_ROLES"], "the claim with the roles: a list, a text, or an object of organizations; its name, or the path to it with dots", "`realm_access.roles`"),
            setting(&["SVC_OIDC_ROLE_MAPPING"], "which names of the provider grant the roles `user` and `admin`: `NAME=ROLE` with commas, or as JSON, `{\"NAME\": \"ROLE\"}`, for names with commas. No other name grants one then", "`user=user,admin=admin`"),
            setting(&["SVC_OIDC_ROLE_SEPARATOR"], "what separates the roles where the claim is one text: `space`, `comma`, `semicolon`, or a sign", "one text is one role; `scope` and `scp` are separated by blanks"),
            setting(&["SVC_OIDC_CLAIM_ORG_ID", "SVC_OIDC_CLAIM_PROJECT_ID", "SVC_OIDC_CLAIM_PLAN"], "the claims with organisation, project and plan", "`org_id`, `project_id`, `plan`"),
            setting(&["SVC_OIDC_ALGORITHMS"], "by which algorithms it may sign, with commas", "RS256, RS384, PS256, ES256, ES384, EdDSA"),
            setting(&["SVC_OIDC_CA_PATH"], "authorities for its certificate, PEM, beside the system's", "the system's alone"),
            setting(&["SVC_OIDC_CLIENT_ID"], "the provider's client as which `gpuctl` logs people in: public, with device or browser log-in to `http://127.0.0.1`", "`gpuctl`"),
            setting(&["SVC_OIDC_CONSOLE_CLIENT_ID"], "the provider's client as which people log in to the [web console](../operator/console-login.md), with `https://…/console/callback` at the public URL as its redirect URI", "no login to the console"),
            setting(&["SVC_OIDC_CONSOLE_CLIENT_SECRET"], "its secret", "a public client, by PKCE alone"),
            setting(&["SVC_OIDC_CONSOLE_SCOPE"], "the scopes that are asked for, with spaces; some providers need `offline_access` for a login that outlasts one access token", "`openid profile email`"),
            setting(&["SVC_OIDC_CONSOLE_RESOURCE"], "the resource that the access token is asked for (RFC 8707), where the provider needs it", "none is named"),
            setting(&["INTERNAL_JWKS_REFRESH_TOKEN"], "opens `POST /internal/auth/jwks/refresh`, 32 characters or more", "that route answers 404"),
        ],
    },
    Section {
        title: "Payments",
        intro: "[Chapter](../operator/payments.md).",
        unset: "",
        settings: &[
            setting(&["SVC_PAYMENTS_SECRET_KEY"], "the processor's key for servers", ""),
            setting(&["SVC_PAYMENTS_WEBHOOK_SECRETS"], "the secret of its webhooks' endpoint; two with commas while it is rotated", ""),
            setting(&["SVC_PAYMENTS_API_BASE"], "where it is; `https://api.stripe.com` by default", ""),
            setting(&["SVC_PAYMENTS_CA_PATH"], "its authorities, where its certificate is by none of the system's", ""),
            setting(&["SVC_PAYMENTS_CHECKOUT"], "`sessions`: users pay on its own page (Checkout Sessions); `page`: on ours (PaymentIntents)", ""),
            setting(&["SVC_PAYMENTS_PUBLISHABLE_KEY"], "for `page`: its key for browsers", ""),
            setting(&["SVC_PAYMENTS_SCRIPT_URL"], "for `page`: its script; `https://js.stripe.com/v3/` by default", ""),
            setting(&["SVC_PAYMENTS_CURRENCY"], "in which a first payment opens an account; `EUR` by default. Not `ISK` or `UGX`: Stripe takes their amounts with two decimals", ""),
            setting(&["SVC_PAYMENTS_RECONCILE_SECONDS"], "how often its records are reconciled with ours; 300 by default", ""),
        ],
    },
    Section {
        title: "",
        intro: "",
        unset: "default",
        settings: &[
            setting(&["SVC_WEBHOOK_LISTEN"], "where the processor's events are received, over TLS with the certificate of the public API", "`0.0.0.0:7443`"),
        ],
    },
    Section {
        title: "E-mail and webhooks",
        intro: "A webhook's receiver has an HTTPS address on the internet, unless these admit others. [Chapter](../operator/email.md).",
        unset: "where it is not set",
        settings: &[
            setting(&["SVC_SMTP_URL"], "the mail server: `smtps://user:password@host:465` (TLS, the better way), or `smtp://user:password@host:587?tls=required` (STARTTLS), user and password percent-encoded; without TLS only a server on this machine, as `smtp://localhost`", "no e-mail"),
            setting(&["SVC_SMTP_FROM"], "the sender, as `GPUaaS <no-reply@example.com>`", "required with `SVC_SMTP_URL`"),
            setting(&["SVC_NOTIFICATION_CA_PATH"], "authorities of the certificates of mail servers and of webhooks' receivers, PEM, beside the system's", "the system's alone"),
            setting(&["SVC_NOTIFICATION_ALLOWED_CIDRS"], "private networks of the operator's whose receivers of webhooks are admitted, with commas; `deploy/up` passes it on, with `SVC_NOTIFICATION_CA_PATH`, `SVC_SMTP_URL` and `SVC_SMTP_FROM`", "none"),
        ],
    },
    Section {
        title: "The node API behind a proxy",
        intro: "[Chapter](../operator/proxies.md#in-front-of-the-node-api).",
        unset: "default",
        settings: &[
            setting(&["SVC_NODE_CLIENT_IDENTITY"], "`tls`, or the way of the proxies: `rfc9440` (`Client-Cert`), `xfcc` (`X-Forwarded-Client-Cert`), `nginx` (`ssl-client-cert`)", "`tls`"),
            setting(&["SVC_NODE_TRUSTED_PROXIES"], "the proxies' own addresses, as networks with commas; nothing else may connect from there", "required with a way of proxies"),
            setting(&["SVC_NODE_PUBLIC_URL"], "where nodes reach the node API: with proxies, theirs; bundles name it", "required"),
        ],
    },
    Section {
        title: "Monitoring",
        intro: "[Chapter](../operator/monitoring.md).",
        unset: "default",
        settings: &[
            setting(&["SVC_OPERATIONS_LISTEN"], "the operators' address; keep it off networks of others", "`127.0.0.1:9464`"),
            setting(&["INTERNAL_STATS_TOKEN"], "opens the stats, and on the public address `/metrics` and `readyz` too, 32 characters or more", "these routes answer 404"),
            setting(&["SVC_ALERTMANAGER_URL"], "the Alertmanager whose alerts `gpuctl alerts` and the console show, without the path `/api/v2`; HTTPS, or HTTP on this machine", "none are shown"),
            setting(&["SVC_ALERTMANAGER_CA_PATH"], "authorities for its certificate, PEM, beside the system's", "the system's alone"),
            setting(&["SVC_ALERTMANAGER_TENANT"], "the tenant there, which is sent as `X-Scope-OrgID`", "none is sent"),
            setting(&["SVC_ALERTMANAGER_USER", "SVC_ALERTMANAGER_PASSWORD"], "by which it admits this service (basic authentication); `SVC_ALERTMANAGER_PASSWORD` is a secret", "none is sent"),
            setting(&["SVC_ALERTMANAGER_TOKEN"], "a bearer token, in place of user and password; a secret", "none is sent"),
            setting(&["SVC_ALERTMANAGER_PASSWORD_PATH", "SVC_ALERTMANAGER_TOKEN_PATH"], "a file with the password or the token alone, in place of the value, read at the start; a line end at its end and a byte-order mark at its beginning are left out", "the value"),
            setting(&["RUST_LOG"], "what is logged, in JSON lines on standard error", "`info`"),
            setting(&["SVC_HOST_ROLE"], "`platform_control`, `app_control` or `worker_compute`, on every line of a lab's machine", "an agent's is `worker_compute`"),
            setting(&["SVC_HOST_NAME", "SVC_LAB_STACK", "SVC_NODE_ID"], "likewise; an agent knows its node", "the host's name where it has a role; none; none"),
            setting(&["OTEL_EXPORTER_OTLP_ENDPOINT"], "a collector of traces (OTLP over HTTP, protobuf), as `http://collector.example:4318`; `_HEADERS` and `_TIMEOUT` are read too", "nothing is exported"),
            setting(&["OTEL_TRACES_SAMPLER_ARG"], "the share of the traces that begin here to export; a caller's `traceparent` decides for its own", "`1`"),
            setting(&["OTEL_SERVICE_NAME"], "the service name of the spans", "`gpuaas`"),
        ],
    },
    Section {
        title: "The logs of nodes",
        intro: "[Chapter](../operator/logs.md).",
        unset: "where it is not set",
        settings: &[
            setting(&["SVC_LOG_STORE_URL"], "the log store, without the path `/loki/api/v1/push`; HTTPS, or HTTP on this machine", "the gateway answers 503"),
            setting(&["SVC_LOG_STORE_CA_PATH"], "authorities for its certificate, PEM, beside the system's", "the system's alone"),
            setting(&["SVC_LOG_STORE_TENANT"], "the tenant there, which is sent as `X-Scope-OrgID`", "none is sent"),
            setting(&["SVC_LOG_STORE_USER", "SVC_LOG_STORE_PASSWORD"], "by which it admits this service (basic authentication); `SVC_LOG_STORE_PASSWORD` is a secret", "none is sent"),
            setting(&["SVC_LOG_STORE_TOKEN"], "a bearer token, in place of user and password; a secret", "none is sent"),
            setting(&["SVC_LOG_STORE_PASSWORD_PATH", "SVC_LOG_STORE_TOKEN_PATH"], "a file with the password or the token alone, in place of the value, read at the start; a line end at its end and a byte-order mark at its beginning are left out", "the value"),
        ],
    },
    Section {
        title: "Bare-metal machines",
        intro: "[Chapter](../operator/maas.md).",
        unset: "where it is not set",
        settings: &[
            setting(&["MAAS_API_BASE_URL"], "the provider with MAAS's API 2.0, such as `https://maas.example:5443/MAAS`, without `/api/2.0`; HTTPS, or HTTP on this machine", "nodes are registered in mode manual alone"),
            setting(&["MAAS_API_TOKEN"], "the API key of its user, `consumer:token:secret`; a secret", "required with the address"),
            setting(&["MAAS_API_TIMEOUT_MS"], "of each request, 100 to 60000", "`10000`"),
            setting(&["MAAS_API_CA_PATH"], "authorities for its certificate, PEM, beside the system's", "the system's alone"),
            setting(&["MAAS_IMAGE"], "the image that is deployed, as MAAS names it (`distro_series`)", "the provider's default"),
            setting(&["MAAS_IMAGE_DIGEST"], "what that image has in `/etc/gpuaas/image-digest`, which a reinstalled machine has to show", "no digest is asked for"),
        ],
    },
    Section {
        title: "The agent's package",
        intro: "Where the agent's package is, and how nodes get it. [Chapter](../operator/packages.md). Bundles have what is set here under the same names;\nbootstrap scripts with the package need the reference, the digest, the release keys and the installer.",
        unset: "where it is not set",
        settings: &[
            setting(&["SVC_NODE_AGENT_PACKAGE_OCI_REF"], "the repository of the package, such as `registry.example:5000/gpuaas/agent`", "`null`"),
            setting(&["SVC_NODE_AGENT_PACKAGE_DIGEST"], "its digest, with the reference", "`null`"),
            setting(&["SVC_NODE_AGENT_PACKAGE_RELEASE_KEYS"], "Ed25519 public keys, base64, with commas: one of them must have signed it", "`null`"),
            setting(&["SVC_NODE_AGENT_PACKAGE_PULL_DELIVERY_MODE"], "`bundle` or `node-api`", "`null`, which is `bundle`"),
            setting(&["SVC_NODE_AGENT_PACKAGE_PULL_ACCOUNT_PATH"], "a file with `user:password` of an account that may pull", "no account"),
            setting(&["SVC_NODE_AGENT_PACKAGE_REGISTRY_CA_PATH"], "authorities for the registry's certificate, PEM. In the mode `bundle` they go into bundles (`SVC_NODE_AGENT_PACKAGE_REGISTRY_CA_PEM`) as the only ones; in the mode `node-api` they are trusted beside the system's", "`bundle`: those of `SVC_TLS_CA_PATH`; `node-api`: the system's alone"),
            setting(&["SVC_NODE_AGENT_INSTALLER_PATH"], "the static `gpuaas-installer` that bootstrap scripts carry", "no scripts with the package"),
            setting(&["SVC_NODE_AGENT_INSTALL_ROOT"], "where it is installed", "`null`; scripts: `/opt/gpuaas`"),
            setting(&["SVC_NODE_AGENT_ENV_FILE"], "the agent's environment file, also what bootstrap scripts and restart commands write", "`null`; scripts: `/etc/gpuaas/agent.env`"),
            setting(&["SVC_NODE_AGENT_SYSTEMD_UNIT"], "the agent's unit, also what they restart", "`null`; scripts: `gpuaas-agent.service`"),
        ],
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fmt::Write as _;
    use std::path::{Path, PathBuf};

    fn tables() -> String {
        let mut page = String::new();
        for Section { title, intro, unset, settings } in SECTIONS {
            if !title.is_empty() {
                let _ = writeln!(page, "## {title}\n");
            }
            if !intro.is_empty() {
                let _ = writeln!(page, "{intro}\n");
            }
            let has_unset = !unset.is_empty();
            let _ = match has_unset {
                true => writeln!(page, "| variable | what | {unset} |\n| --- | --- | --- |"),
                false => writeln!(page, "| variable | what |\n| --- | --- |"),
            };
            for Setting { names, meaning, unset } in *settings {
                let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
                let names = names.join(", ");
                let _ = match has_unset {
                    true => writeln!(page, "| {names} | {meaning} | {unset} |"),
                    false => writeln!(page, "| {names} | {meaning} |"),
                };
            }
            page.push('\n');
        }
        page
    }

    #[test]
    fn configuration_page_has_the_table_of_settings() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/docs/src/reference/configuration.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let (begin, end) = (page.find("## A replica\n").unwrap(), page.find("## The agent\n").unwrap());
        let generated = format!("{}{}{}", &page[..begin], tables(), &page[end..]);
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&path, &generated).unwrap();
        } else {
            let hint = "configuration.md is not what the table says: UPDATE_DOCS=1 cargo test -p supervisors settings_table writes it";
            assert_eq!(page, generated, "{hint}");
        }
    }

    fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => rust_files(&path, found),
                false => found.extend(path.extension().is_some_and(|it| it == "rs").then_some(path)),
            }
        }
    }

    #[test]
    fn every_setting_of_the_table_is_read_by_the_code() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut files = Vec::new();
        for folder in ["src", "../agent/telemetry/src", "../agent/wire/src", "../edge/src"] {
            rust_files(&root.join(folder), &mut files);
        }
        files.retain(|file| !file.ends_with("settings_table.rs") && !file.ends_with("dev/environment.rs"));
        let text: String = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
        // The logging library reads its own.
        let unread: BTreeSet<_> =
            names().filter(|name| *name != "RUST_LOG" && !text.contains(&format!("\"{name}\""))).collect();
        assert!(unread.is_empty(), "{unread:?}");
    }

    #[test]
    fn misspelled_name_is_found_with_the_one_that_was_meant() {
        for (name, meant) in [
            ("SVC_DATABSE_URL", "SVC_DATABASE_URL"),
            ("SVC_OICD_ISSUER", "SVC_OIDC_ISSUER"),
            ("SCV_NATS_URL", "SVC_NATS_URL"),
            ("MAAS_API_TOKENS", "MAAS_API_TOKEN"),
        ] {
            let mistake = mistake(name).unwrap();
            assert!(mistake.ends_with(&format!("did you mean {meant}?")), "{mistake}");
        }
        assert!(mistake("SVC_SOMETHING_ELSE_ENTIRELY").unwrap().contains("remove it"));
        for other in ["SVC_NATS_URL", "PATH", "RUST_LOG", "RUST_BACKTRACE", "OTEL_EXPORTER_OTLP_HEADERS", "HTTPS_PROXY"]
        {
            assert_eq!(mistake(other), None, "{other}");
        }
        assert_eq!((distance("", "abc"), distance("abc", ""), distance("kitten", "sitting")), (3, 3, 3));
    }
}
