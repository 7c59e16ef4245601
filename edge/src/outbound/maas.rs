//! The client of a bare-metal provider with MAAS's API 2.0: it finds a machine, deploys it with user data, releases it with its disks
//! erased, and marks it as broken.
//!
//! Each request is bounded in time and in the length of its answer, and follows no redirect. None is repeated here: the callers read the
//! machine's status first, and come again.

mod api_key;
mod error;
#[cfg(test)]
mod tests;

pub use api_key::{ApiKey, ApiKeyError};
pub use error::MaasError;

use crate::outbound::http_client::{client_builder, error_chain, read_bounded_body};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use reqwest::{Client, Method, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::time::Duration;
use thiserror::Error;
use tokio::sync::OnceCell;
use tokio::time::timeout;
use wire::address::{AddressError, ServiceUrl};

/// The path of the API, below the address of the server.
const API_PATH: &str = "/api/2.0/";
/// A machine with its interfaces and disks has some 50 KB; a search by host name answers with a few of them.
const ANSWER_BYTES: usize = 4 * 1024 * 1024;
/// How much of a refusal is shown to operators.
const REFUSAL_SHOWN: usize = 300;
/// What allocations here are marked with at the provider, before the id of the node.
const AGENT_NAME: &str = "gpuaas";

/// The settings of the client.
#[derive(Clone, Debug)]
pub struct MaasSettings {
    /// The server's address, such as `https://maas.example:5443/MAAS`, without the path of the API.
    pub base_url: String,
    pub key: ApiKey,
    /// Of each request, from its beginning to the end of its answer.
    pub timeout: Duration,
    /// Authorities that are trusted beside the system's.
    pub authorities_pem: Option<String>,
    /// The image that is deployed, as MAAS names it (`distro_series`); without it the provider's default.
    pub image: Option<String>,
    /// The digest that a machine with this image shows; without it none is asked for.
    pub image_digest: Option<String>,
}

/// Why the client could not be built.
#[derive(Debug, Error)]
pub enum MaasSettingsError {
    #[error("{0}")]
    Address(AddressError),
    #[error("the client for the bare-metal provider cannot be made: {0}")]
    Client(String),
}

/// A server with MAAS's API.
pub struct Maas {
    api: Url,
    client: Client,
    settings: MaasSettings,
    /// The user of the API key, once it was asked for.
    user: OnceCell<String>,
}

/// A machine as the provider describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaasMachine {
    pub system_id: String,
    pub hostname: String,
    pub fqdn: String,
    pub status: MachineStatus,
    /// The status by the provider's name for it.
    pub status_name: String,
    pub power: PowerState,
    /// The user who has it allocated.
    pub owner: Option<String>,
}

/// What a machine's status means here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineStatus {
    /// In the pool, allocated to no user.
    Ready,
    Allocated,
    Deploying,
    Deployed,
    FailedDeployment,
    /// Being released, or its disks being erased.
    Releasing,
    FailedReleasing,
    Broken,
    /// Any other, also of a newer server: progress, until the deadline.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerState {
    On,
    Off,
    /// The provider cannot switch it, or does not know how it stands.
    Unknown,
}

impl Maas {
    /// # Errors
    /// Where the address is not on HTTPS or has the path of the API, or the authorities cannot be read.
    pub fn new(settings: MaasSettings) -> Result<Self, MaasSettingsError> {
        let base = ServiceUrl::parse(&settings.base_url).map_err(MaasSettingsError::Address)?;
        if base.as_str().ends_with(API_PATH.trim_end_matches('/')) {
            let why = format!("already ends in the path of the API, which is added to it; leave {API_PATH} out");
            return Err(MaasSettingsError::Address(base.refuse(why)));
        }
        let api = Url::parse(&format!("{}{API_PATH}", base.as_str()));
        let api = api.map_err(|error| MaasSettingsError::Client(error.to_string()))?;
        let client = client_builder(settings.authorities_pem.as_deref()).map_err(MaasSettingsError::Client)?;
        let client = client.connect_timeout(settings.timeout).build();
        let client = client.map_err(|error| MaasSettingsError::Client(error.to_string()))?;
        Ok(Self { api, client, settings, user: OnceCell::new() })
    }

    /// The digest that a machine with the deployed image shows.
    #[must_use]
    pub fn image_digest(&self) -> Option<&str> {
        self.settings.image_digest.as_deref()
    }

    /// The machines with this host name or fully qualified name.
    ///
    /// # Errors
    /// [`MaasError`]
    pub async fn find(&self, host: &str) -> Result<Vec<MaasMachine>, MaasError> {
        let label = host.split('.').next().unwrap_or(host);
        let found: Vec<MachineRecord> = self.get("machines/", &[("hostname", label)]).await?;
        let is_it = |machine: &MaasMachine| machine.hostname == host || machine.fqdn == host;
        Ok(found.into_iter().map(MaasMachine::from).filter(is_it).collect())
    }

    /// The machine; `None` where the provider has none with this id.
    ///
    /// # Errors
    /// [`MaasError`]
    pub async fn machine(&self, system_id: &str) -> Result<Option<MaasMachine>, MaasError> {
        match self.get::<MachineRecord>(&machine_path(system_id), &[]).await {
            Ok(record) => Ok(Some(record.into())),
            Err(MaasError::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the machine is allocated to the user of the API key.
    ///
    /// # Errors
    /// [`MaasError`]
    pub async fn is_ours(&self, machine: &MaasMachine) -> Result<bool, MaasError> {
        Ok(machine.owner.as_deref() == Some(self.user().await?))
    }

    /// The user of the API key, as the provider names it.
    ///
    /// # Errors
    /// [`MaasError`]
    pub async fn user(&self) -> Result<&str, MaasError> {
        let user = self.user.get_or_try_init(|| async {
            let user: UserRecord = self.get("users/", &[("op", "whoami")]).await?;
            Ok::<_, MaasError>(user.username)
        });
        user.await.map(String::as_str)
    }

    /// Allocates the machine to the user of the API key.
    ///
    /// # Errors
    /// [`MaasError::Conflict`] where it is not ready.
    pub async fn allocate(&self, system_id: &str, node_id: &str) -> Result<MaasMachine, MaasError> {
        let agent_name = format!("{AGENT_NAME}-{node_id}");
        let form = [("system_id", system_id), ("agent_name", &agent_name)];
        let record: MachineRecord = self.post("machines/", "allocate", &form).await?;
        Ok(record.into())
    }

    /// Installs the image, and has it run `user_data` at its first boot.
    ///
    /// # Errors
    /// [`MaasError::Conflict`] where the machine is not allocated.
    pub async fn deploy(&self, system_id: &str, user_data: &[u8]) -> Result<MaasMachine, MaasError> {
        let user_data = STANDARD.encode(user_data);
        let mut form = vec![("user_data", user_data.as_str())];
        form.extend(self.settings.image.as_deref().map(|image| ("distro_series", image)));
        let record: MachineRecord = self.post(&machine_path(system_id), "deploy", &form).await?;
        Ok(record.into())
    }

    /// Gives the machine back to the pool, with its disks erased.
    ///
    /// # Errors
    /// [`MaasError::Conflict`] where its status does not allow it.
    pub async fn release(&self, system_id: &str, comment: &str) -> Result<MaasMachine, MaasError> {
        let form = [("erase", "true"), ("secure_erase", "true"), ("quick_erase", "true"), ("comment", comment)];
        let record: MachineRecord = self.post(&machine_path(system_id), "release", &form).await?;
        Ok(record.into())
    }

    /// Takes the machine out of the pool until an operator of the provider has repaired it.
    ///
    /// # Errors
    /// [`MaasError`]
    pub async fn mark_broken(&self, system_id: &str, comment: &str) -> Result<MaasMachine, MaasError> {
        let record: MachineRecord = self.post(&machine_path(system_id), "mark_broken", &[("comment", comment)]).await?;
        Ok(record.into())
    }

    async fn get<T: DeserializeOwned>(&self, path: &str, query: &[(&str, &str)]) -> Result<T, MaasError> {
        self.send(Method::GET, path, query, &[]).await
    }

    async fn post<T: DeserializeOwned>(&self, path: &str, op: &str, form: &[(&str, &str)]) -> Result<T, MaasError> {
        self.send(Method::POST, path, &[("op", op)], form).await
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
        form: &[(&str, &str)],
    ) -> Result<T, MaasError> {
        let url = self.api.join(path).map_err(|error| MaasError::Unreadable(error.to_string()))?;
        let mut request = self.client.request(method, url).query(query).header(ACCEPT, "application/json");
        if !form.is_empty() {
            request = request.form(form);
        }
        let request = request.header(AUTHORIZATION, self.settings.key.authorization());
        let answered = timeout(self.settings.timeout, async {
            let response = request.send().await.map_err(|error| match error.is_timeout() {
                true => MaasError::Slow,
                false => MaasError::Unreachable(error_chain(error)),
            })?;
            let (status, kind) = (response.status(), response.headers().get(CONTENT_TYPE).cloned());
            let body = read_bounded_body(response, ANSWER_BYTES).await.map_err(MaasError::Cut)?;
            Ok((status, kind, body))
        });
        let (status, kind, body) = answered.await.map_err(|_| MaasError::Slow)??;
        if !status.is_success() {
            return Err(MaasError::refused(status, shown(&body)));
        }
        let is_page = kind.as_ref().and_then(|kind| kind.to_str().ok()).is_some_and(|kind| kind.contains("html"));
        if is_page {
            return Err(MaasError::Page);
        }
        strict_json::from_slice(&body).map_err(|error| MaasError::Unreadable(error.to_string()))
    }
}

impl fmt::Debug for Maas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Maas").field("api", &self.api.as_str()).finish_non_exhaustive()
    }
}

#[derive(Deserialize)]
struct UserRecord {
    username: String,
}

/// What is read of a machine.
#[derive(Deserialize)]
struct MachineRecord {
    system_id: String,
    #[serde(default)]
    hostname: String,
    #[serde(default)]
    fqdn: String,
    status_name: String,
    #[serde(default)]
    power_state: Option<String>,
    #[serde(default)]
    owner: Option<String>,
}

impl From<MachineRecord> for MaasMachine {
    fn from(record: MachineRecord) -> Self {
        Self {
            status: MachineStatus::of(&record.status_name),
            system_id: record.system_id,
            hostname: record.hostname,
            fqdn: record.fqdn,
            status_name: shown(record.status_name.as_bytes()),
            power: match record.power_state.as_deref() {
                Some("on") => PowerState::On,
                Some("off") => PowerState::Off,
                Some(_) | None => PowerState::Unknown,
            },
            owner: record.owner.filter(|owner| !owner.is_empty()),
        }
    }
}

impl MachineStatus {
    fn of(name: &str) -> Self {
        match name {
            "Ready" => Self::Ready,
            "Allocated" => Self::Allocated,
            "Deploying" => Self::Deploying,
            "Deployed" => Self::Deployed,
            "Failed deployment" => Self::FailedDeployment,
            "Releasing" | "Disk erasing" => Self::Releasing,
            "Releasing failed" | "Failed disk erasing" => Self::FailedReleasing,
            "Broken" => Self::Broken,
            _ => Self::Other,
        }
    }
}

/// The id comes from the provider, and is one segment of a path here.
fn machine_path(system_id: &str) -> String {
    use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
    format!("machines/{}/", utf8_percent_encode(system_id, NON_ALPHANUMERIC))
}

fn shown(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    text.trim().chars().filter(|character| !character.is_control()).take(REFUSAL_SHOWN).collect()
}
