//! Onboarding of nodes: registration, enrollment tokens and bootstrap scripts.

use super::{ALONE, node_id, path};
use crate::api::Api;
use crate::completion;
use crate::download::UnfinishedFile;
use crate::duration;
use crate::failure::{ExitStatus, Failure};
use crate::labels::Metadata;
use crate::printable::cell;
use crate::resource_ref::{self, NODE, Ref, items};
use crate::ssh_keys::public_key;
use clap::ValueEnum;
use serde_json::{Value, json};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The most nodes with which the address of a new one is compared.
const MAX_COMPARED: usize = 10_000;

#[derive(Debug, clap::Args)]
pub(crate) struct Create {
    /// The machine's address: a name or an IP address.
    host: String,
    /// The port of its SSH server.
    #[arg(long, default_value_t = 22)]
    port: u16,
    /// The kind of machine: `gpuctl skus list` shows them.
    #[arg(long, add = completion::sku_names())]
    sku: String,
    /// The region where it is.
    #[arg(long, value_name = "CODE")]
    region: String,
    /// How many GPUs it has.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    gpus: u16,
    /// The operator's login on it.
    #[arg(long, value_name = "NAME")]
    ssh_user: String,
    /// The operator's public key, in OpenSSH's form; `-` reads standard input.
    #[arg(long, value_name = "FILE")]
    ssh_public_key: PathBuf,
    /// How its agent is installed.
    #[arg(long, value_enum, default_value_t)]
    onboarding: Onboarding,
    /// Do not probe its address first.
    #[arg(long)]
    no_probe: bool,
    #[command(flatten)]
    metadata: Metadata,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(crate) enum Onboarding {
    /// An operator installs it.
    #[default]
    Manual,
    /// MAAS deploys it.
    Maas,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Token {
    #[arg(add = completion::of(&NODE))]
    node: Ref,
    /// How long it is good for (`30m`, `24h`); the policy's default if it is left out.
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    ttl: Option<Duration>,
    /// The file for the bootstrap bundle, which must not be there; standard output where it is left out.
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Reissue {
    #[command(flatten)]
    token: Token,
    /// The reason, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// Revoke the certificate that the node has now.
    #[arg(long)]
    revoke: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Script {
    #[arg(add = completion::of(&NODE))]
    node: Ref,
    /// The form of the script.
    #[arg(long = "as", value_enum, value_name = "FORM", default_value_t)]
    form: Form,
    /// The file for the script, which must not be there; standard output where it is left out.
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(crate) enum Form {
    /// A script to run as root; the agent is installed already.
    #[default]
    Script,
    /// A script to run as root that installs the agent's package, too.
    Package,
}

pub(crate) async fn create(wanted: Create, api: &Api) -> Result<(), Failure> {
    let mode = match wanted.onboarding {
        Onboarding::Manual => "manual",
        Onboarding::Maas => "maas",
    };
    let mut body = json!({
        "host": wanted.host,
        "port": wanted.port,
        "sku": wanted.sku,
        "region_code": wanted.region,
        "gpus_total": wanted.gpus,
        "ssh_username": wanted.ssh_user,
        "ssh_public_key": public_key(&wanted.ssh_public_key)?,
        "onboarding_mode": mode,
        "probe": !wanted.no_probe,
    });
    wanted.metadata.add_to(&mut body)?;
    let made = api.post(NODE.path, &body).await?;
    api.out.show(&made, &ALONE)?;
    let id = cell(&made["id"]);
    api.out.notice(&probe_notice(&made, &id));
    // The node is made, whether or not the list can be read.
    let nodes = resource_ref::present_nodes(&Vec::new(), MAX_COMPARED, api).await.unwrap_or_default();
    if let Some(notice) = same_address_notice(&made, items(&nodes)) {
        api.out.notice(&notice);
    }
    api.out.notice(&next_step(wanted.onboarding, &id));
    Ok(())
}

/// Names the nodes that have the address of a new one already. Several agents on one machine, and machines behind one address, are allowed.
fn same_address_notice(made: &Value, nodes: &[Value]) -> Option<String> {
    let has_its_address =
        |node: &&Value| node["id"] != made["id"] && node["host"] == made["host"] && node["port"] == made["port"];
    let others: Vec<String> = nodes.iter().filter(has_its_address).map(|node| cell(&node["id"])).collect();
    let (first, count) = (others.first()?, others.len());
    let more = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
    Some(format!(
        "Warning: {} port {} is the address of node {first}{more} already. If it is the same machine, use that node, and remove this one \
         (gpuctl nodes retire, gpuctl nodes remove): a GPU is given to one node alone.",
        cell(&made["host"]),
        cell(&made["port"]),
    ))
}

/// How the agent comes onto a new node.
fn next_step(onboarding: Onboarding, id: &str) -> String {
    match onboarding {
        Onboarding::Manual => format!("Install its agent with: gpuctl nodes script {id} --to install.sh"),
        Onboarding::Maas => format!(
            "MAAS deploys the machine and installs its agent; there is nothing to run on it. `machine step` shows how far it is: \
             gpuctl nodes show {id}"
        ),
    }
}

/// The outcome of the probe of a new node's address, or how to ask for one.
fn probe_notice(node: &Value, id: &str) -> String {
    let repeated = format!("gpuctl nodes update {id} --probe");
    let address = format!("{} port {}", cell(&node["host"]), cell(&node["port"]));
    match (&node["probe"]["result"], &node["probe"]["error"]) {
        (Value::Null, _) => format!("{address} was not probed; probe it with: {repeated}"),
        (result, Value::Null) => format!("{address} is {}.", cell(result)),
        (result, error) => format!("{address} is {}: {}. Probe it again with: {repeated}", cell(result), cell(error)),
    }
}

pub(crate) async fn token(wanted: Token, api: &Api) -> Result<(), Failure> {
    let file = secret_file(wanted.to.as_deref())?;
    let id = node_id(&wanted.node, api).await?;
    let mut body = json!({});
    if let Some(ttl) = wanted.ttl {
        body["ttl_seconds"] = ttl.as_secs().into();
    }
    let issued = api.post(&format!("{}/enrollment-token", path(id)), &body).await?;
    bundle(&issued, "bootstrap_bundle", file, api)
}

pub(crate) async fn reissue(wanted: Reissue, api: &Api) -> Result<(), Failure> {
    let file = secret_file(wanted.token.to.as_deref())?;
    let id = node_id(&wanted.token.node, api).await?;
    let mut body = json!({ "reason": wanted.reason, "revoke_current_certificate": wanted.revoke });
    if let Some(ttl) = wanted.token.ttl {
        body["ttl_seconds"] = ttl.as_secs().into();
    }
    let issued = api.post(&format!("{}/reissue-enrollment", path(id)), &body).await?;
    bundle(&issued, "recovery_bundle", file, api)
}

pub(crate) async fn script(wanted: Script, api: &Api) -> Result<(), Failure> {
    let file = secret_file(wanted.to.as_deref())?;
    let id = node_id(&wanted.node, api).await?;
    let form = match wanted.form {
        Form::Script => "script",
        Form::Package => "package",
    };
    let written = api.post(&format!("{}/bootstrap-script", path(id)), &json!({ "format": form })).await?;
    let Some(text) = written["script"].as_str() else {
        return Err(Failure::unusable_answer("the server's answer holds no script"));
    };
    secret(&written, text.trim_end(), file, api)
}

/// The file for a secret, made before the secret is issued: where it cannot be, nothing is issued that could not be saved.
fn secret_file(to: Option<&Path>) -> Result<Option<(&Path, UnfinishedFile)>, Failure> {
    to.map(|to| UnfinishedFile::create(to).map(|file| (to, file))).transpose()
}

fn bundle(issued: &Value, name: &str, file: Option<(&Path, UnfinishedFile)>, api: &Api) -> Result<(), Failure> {
    secret(issued, &format!("{:#}", issued[name]), file, api)
}

/// Prints a text with a token, or writes it to its file.
fn secret(answer: &Value, text: &str, file: Option<(&Path, UnfinishedFile)>, api: &Api) -> Result<(), Failure> {
    let Some((to, mut new)) = file else {
        return if api.out.is_json() { api.out.json(answer) } else { api.out.line(text) };
    };
    let shown = to.display();
    writeln!(new.file, "{text}").map_err(|error| {
        Failure::new(ExitStatus::Failed, format!("the token was issued, and {shown} cannot be written: {error}"))
            .next("Make room there, and repeat the command for another token.")
    })?;
    new.keep();
    let until = cell(&answer["expires_at"]);
    let written = json!({ "file": to, "token_id": answer["token_id"], "expires_at": answer["expires_at"] });
    api.out.done(&written, &format!("{shown} holds a token that is good until {until}."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_node_says_who_installs_its_agent() {
        let manual = next_step(Onboarding::Manual, "0198");
        assert_eq!(manual, "Install its agent with: gpuctl nodes script 0198 --to install.sh");
        let maas = next_step(Onboarding::Maas, "0198");
        assert!(maas.contains("MAAS deploys") && maas.ends_with("gpuctl nodes show 0198"), "{maas}");
        assert!(!maas.contains("script"), "{maas}");
    }

    #[test]
    fn new_node_with_the_address_of_another_one_is_warned_of() {
        let node = |id: &str, host: &str, port: u16| json!({ "id": id, "host": host, "port": port, "state": "active" });
        let made = node("new", "gpu-1.example", 22);
        let notice = |others: &[Value]| same_address_notice(&made, &[others, std::slice::from_ref(&made)].concat());
        assert_eq!(notice(&[node("a", "gpu-2.example", 22), node("b", "gpu-1.example", 2222)]), None);
        let one = notice(&[node("a", "gpu-1.example", 22)]).unwrap();
        assert!(
            one.contains("gpu-1.example port 22 is the address of node a already") && one.contains("nodes remove"),
            "{one}"
        );
        let two = notice(&[node("a", "gpu-1.example", 22), node("b", "gpu-1.example", 22)]).unwrap();
        assert!(two.contains("node a and 1 more already"), "{two}");
    }

    #[test]
    fn new_node_reports_its_probe_or_how_to_ask_for_one() {
        let node = |probe: Value| json!({ "host": "gpu-1.example", "port": 22, "probe": probe });
        let notice = |probe: Value| probe_notice(&node(probe), "0198");
        assert_eq!(notice(json!({ "result": "reachable", "error": null })), "gpu-1.example port 22 is reachable.");
        assert_eq!(
            notice(json!({ "result": "unreachable", "error": "connection refused" })),
            "gpu-1.example port 22 is unreachable: connection refused. Probe it again with: gpuctl nodes update 0198 --probe"
        );
        assert_eq!(
            notice(Value::Null),
            "gpu-1.example port 22 was not probed; probe it with: gpuctl nodes update 0198 --probe"
        );
    }
}
