//! The settings of the bare-metal provider.

use super::outside_service::authorities_pem;
use super::variables::Variables;
use anyhow::Context;
use edge::outbound::maas::{ApiKey, Maas, MaasSettings};
use secrecy::SecretString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const BASE_URL: &str = "MAAS_API_BASE_URL";
const TOKEN: &str = "MAAS_API_TOKEN";
const TIMEOUT: &str = "MAAS_API_TIMEOUT_MS";
const CA: &str = "MAAS_API_CA_PATH";
const IMAGE: &str = "MAAS_IMAGE";
const IMAGE_DIGEST: &str = "MAAS_IMAGE_DIGEST";

const DEFAULT_TIMEOUT_MS: u64 = 10_000;
const TIMEOUTS_MS: std::ops::RangeInclusive<u64> = 100..=60_000;

/// The bare-metal provider. Without it no node is registered in mode maas.
#[derive(Debug)]
pub struct MaasConfig {
    settings: MaasSettings,
    ca: Option<PathBuf>,
}

impl MaasConfig {
    /// The provider's client.
    ///
    /// # Errors
    /// Names the variable that cannot be used.
    pub fn open(&self) -> anyhow::Result<Arc<Maas>> {
        let authorities_pem = authorities_pem(CA, self.ca.as_deref())?;
        let maas = Maas::new(MaasSettings { authorities_pem, ..self.settings.clone() }).context(BASE_URL)?;
        Ok(Arc::new(maas))
    }
}

/// All of it, or nothing.
pub(super) fn maas(variables: &mut Variables<'_>) -> Option<MaasConfig> {
    let ca = variables.optional_certificates(CA);
    let Some(base_url) = variables.optional(BASE_URL) else {
        if let Some(name) =
            [TOKEN, TIMEOUT, IMAGE, IMAGE_DIGEST].into_iter().find(|name| variables.optional(name).is_some())
        {
            variables.wrong(format!("{name} is set, but {BASE_URL} is not; set both or neither"));
        }
        return None;
    };
    let token =
        SecretString::from(variables.required(TOKEN, "the API key of a user of the provider, consumer:token:secret"));
    let key = ApiKey::parse(&token).map_err(|error| variables.wrong(format!("{TOKEN}: {error}"))).ok();
    let image_digest = variables.optional(IMAGE_DIGEST);
    if image_digest
        .as_ref()
        .is_some_and(|digest| digest.len() > 128 || !digest.bytes().all(|byte| byte.is_ascii_graphic()))
    {
        variables.wrong(format!("{IMAGE_DIGEST} must be at most 128 printable characters, such as sha256:0f…"));
    }
    let settings = MaasSettings {
        base_url,
        key: key?,
        timeout: Duration::from_millis(timeout_ms(variables)),
        authorities_pem: None,
        image: variables.optional(IMAGE),
        image_digest,
    };
    if let Err(error) = Maas::new(settings.clone()) {
        variables.wrong(format!("{BASE_URL}: {error}"));
    }
    Some(MaasConfig { settings, ca })
}

fn timeout_ms(variables: &mut Variables<'_>) -> u64 {
    let Some(text) = variables.optional(TIMEOUT) else { return DEFAULT_TIMEOUT_MS };
    match text.parse() {
        Ok(millis) if TIMEOUTS_MS.contains(&millis) => millis,
        Ok(_) | Err(_) => {
            let (least, most) = (TIMEOUTS_MS.start(), TIMEOUTS_MS.end());
            variables.wrong(format!("{TIMEOUT} is {text:?}; it must be milliseconds, from {least} to {most}"));
            DEFAULT_TIMEOUT_MS
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::variables::read_from;

    const URL: (&str, &str) = (BASE_URL, "https://maas.example/MAAS");
    const KEY: (&str, &str) = (TOKEN, "consumer:token:s3cret");

    #[test]
    fn provider_is_optional_and_its_key_is_never_shown() {
        assert!(read_from(&[], maas).unwrap().is_none());
        let config = read_from(&[URL, KEY, (TIMEOUT, "500")], maas).unwrap().unwrap();
        assert_eq!(config.settings.timeout, Duration::from_millis(500));
        assert!(!format!("{config:?} {:?}", config.open().unwrap()).contains("s3cret"));
    }

    #[test]
    fn wrong_setting_is_named() {
        for (settings, named) in [
            (vec![URL], TOKEN),
            (vec![KEY], BASE_URL),
            (vec![URL, (TOKEN, "consumer:s3cret")], TOKEN),
            (vec![(BASE_URL, "http://maas.example/MAAS"), KEY], BASE_URL),
            (vec![(BASE_URL, "https://maas.example/MAAS/api/2.0"), KEY], BASE_URL),
            (vec![URL, KEY, (TIMEOUT, "0")], TIMEOUT),
            (vec![URL, KEY, (TIMEOUT, "soon")], TIMEOUT),
            (vec![URL, KEY, (IMAGE_DIGEST, "a b")], IMAGE_DIGEST),
        ] {
            let error = read_from(&settings, maas).unwrap_err().to_string();
            assert!(error.contains(named) && !error.contains("s3cret"), "{error}");
        }
    }
}
