//! What a node of a bare-metal provider is made with: the hook that prepares its registration, and the user data of its deployment.

use crate::api::node::bootstrap_bundle::{bootstrap_bundle, bootstrap_script, package_script};
use crate::app_state::AppState;
use crate::auth::opaque_token::{MintedToken, TokenPurpose, mint};
use crate::http::error::{ApiError, Code};
use crate::outbound::maas::{Maas, MaasError, MaasMachine, MachineStatus, PowerState};
use domain::NodeId;
use domain::node::PreparedMachine;
use domain::policy::{PolicyKey, Scopes};
use secrecy::SecretString;
use thiserror::Error;

/// A fresh token, and the user data that carries it.
pub struct UserData {
    pub token_sha256: [u8; 32],
    pub script: SecretString,
}

/// Why there is no user data.
#[derive(Debug, Error)]
#[error("the script for the machine cannot be written: {0}")]
pub struct UserDataError(String);

/// The user data of one deployment: the script that sets a machine up as this node, which cloud-init runs as root at the first boot. It
/// installs the agent's package where this installation publishes one; else the image has to have the agent.
///
/// # Errors
/// Where a value cannot be carried by a script.
pub fn user_data(app: &AppState, node_id: NodeId) -> Result<UserData, UserDataError> {
    let MintedToken { hash, token } = mint(TokenPurpose::Enrollment);
    let bundle = bootstrap_bundle(app, node_id, token);
    let script = match app.agent_package.for_scripts() {
        Ok(program) => package_script(&bundle, program),
        Err(_) => bootstrap_script(&bundle),
    };
    let script = script.map_err(|error| UserDataError(format!("{error:?}")))?;
    Ok(UserData { token_sha256: hash.to_bytes(), script: script.into() })
}

/// The prepare hook: the provider has exactly one machine of this name, in its pool, and knows how its power stands.
///
/// # Errors
/// `service_unavailable` where that is not so, or the provider is switched off, missing or does not answer.
pub(crate) async fn prepare(app: &AppState, scopes: &Scopes, host: &str) -> Result<PreparedMachine, ApiError> {
    if !app.environment.policy().is_on(PolicyKey::MaasEnabled, scopes, app.environment.now()) {
        return Err(unavailable(
            "The bare-metal provider is switched off; use onboarding_mode manual, or set the policy maas.enabled to true.",
        ));
    }
    let Some(maas) = app.maas.as_deref() else {
        return Err(unavailable(
            "This installation has no bare-metal provider; use onboarding_mode manual, or have the operator set MAAS_API_BASE_URL and \
             MAAS_API_TOKEN.",
        ));
    };
    let machine = the_machine(maas, host).await?;
    let image_digest = maas.image_digest().map(str::to_owned);
    Ok(PreparedMachine { system_id: machine.system_id, image_digest })
}

async fn the_machine(maas: &Maas, host: &str) -> Result<MaasMachine, ApiError> {
    let mut found = maas.find(host).await.map_err(|error| match error {
        MaasError::NotFound => unavailable("The bare-metal provider has no API at its address; correct MAAS_API_BASE_URL."),
        error => unavailable(
            "The bare-metal provider does not answer as it should; the service's log has the reason. Try again after Retry-After.",
        )
        .because(error),
    })?;
    let machine = match (found.pop(), found.len()) {
        (Some(machine), 0) => machine,
        (Some(_), _) => {
            return Err(unavailable(
                "The bare-metal provider has several machines of this name; give the fully qualified name as `host`.",
            ));
        }
        (None, _) => {
            return Err(unavailable(
                "The bare-metal provider has no machine of this name; give its host name, or its fully qualified name, as `host`.",
            ));
        }
    };
    if machine.status != MachineStatus::Ready {
        let status = &machine.status_name;
        return Err(unavailable(format!(
            "The machine is {status} at the bare-metal provider, not Ready; release it there, or commission it."
        )));
    }
    if machine.power == PowerState::Unknown {
        return Err(unavailable(
            "The bare-metal provider does not know whether the machine is switched on; correct its power settings there.",
        ));
    }
    Ok(machine)
}

fn unavailable(message: impl Into<String>) -> ApiError {
    ApiError::new(Code::ServiceUnavailable, message.into())
        .detail("field", "onboarding_mode")
        .detail("policy_key", PolicyKey::MaasEnabled.name())
}
