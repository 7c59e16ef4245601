//! The release signature: Ed25519 over a document that names the digest of the package's image manifest.
//!
//! It has cosign's format and place: an image of its own under the tag `sha256-DIGEST.sig` in the package's repository, whose layer is the
//! signed document and has the signature as an annotation. Registries without the referrers API store it, registries that copy or collect
//! garbage by that convention treat it as a signature, and `cosign verify --key` reads it.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::{Signature, Signer as _, SigningKey};
use serde::{Deserialize, Serialize};
use wire::PublicKey;
use wire::package::Digest;

use crate::manifest::{Descriptor, ImageManifest, MANIFEST_TYPE};

const PAYLOAD_MEDIA_TYPE: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
const CONFIG_MEDIA_TYPE: &str = "application/vnd.oci.image.config.v1+json";
const ANNOTATION: &str = "dev.cosignproject.cosign/signature";
const PAYLOAD_TYPE: &str = "cosign container image signature";

/// The largest signed document, and the most signatures that are looked at.
pub const PAYLOAD_BYTES: u64 = 16 * 1024;
pub const SIGNATURES: usize = 16;

#[derive(Serialize, Deserialize)]
struct Payload {
    critical: Critical,
    optional: Option<BTreeMap<String, String>>,
}

#[derive(Serialize, Deserialize)]
struct Critical {
    identity: Identity,
    image: Image,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Serialize, Deserialize)]
struct Identity {
    #[serde(rename = "docker-reference")]
    reference: String,
}

#[derive(Serialize, Deserialize)]
struct Image {
    #[serde(rename = "docker-manifest-digest")]
    digest: Digest,
}

/// A signature as it is stored: an image manifest and its two blobs.
#[derive(Debug)]
pub struct SignatureImage {
    pub manifest: Vec<u8>,
    pub config: Vec<u8>,
    pub payload: Vec<u8>,
}

/// Why a package counts as not released.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseSignatureError {
    #[error("the signature's manifest cannot be read")]
    Manifest(#[source] serde_json::Error),
    #[error("none of its {signatures} signatures is by one of the {keys} release keys of this node")]
    Foreign { signatures: usize, keys: usize },
}

/// Signs the digest of a package's manifest. The same key and digest give the same bytes.
///
/// # Errors
/// None in practice: the documents have no value that JSON lacks.
pub fn sign(key: &SigningKey, digest: Digest) -> Result<SignatureImage, serde_json::Error> {
    let identity = Identity { reference: String::new() };
    let critical = Critical { identity, image: Image { digest }, kind: PAYLOAD_TYPE.to_owned() };
    let payload = serde_json::to_vec(&Payload { critical, optional: None })?;
    let signature = STANDARD.encode(key.sign(&payload).to_bytes());
    let mut layer = Descriptor::of(PAYLOAD_MEDIA_TYPE, &payload);
    layer.annotations.insert(ANNOTATION.to_owned(), signature);
    let config = serde_json::to_vec(&serde_json::json!({
        "architecture": "", "os": "", "config": {}, "rootfs": { "type": "layers", "diff_ids": [layer.digest] },
    }))?;
    let manifest = ImageManifest {
        schema_version: 2,
        media_type: MANIFEST_TYPE.to_owned(),
        artifact_type: None,
        config: Descriptor::of(CONFIG_MEDIA_TYPE, &config),
        layers: vec![layer],
        annotations: BTreeMap::new(),
    };
    Ok(SignatureImage { manifest: serde_json::to_vec(&manifest)?, config, payload })
}

/// The signed documents that a signature's manifest names, with their signatures; those that could not be valid are left out.
///
/// # Errors
/// [`ReleaseSignatureError::Manifest`].
pub fn candidates(manifest: &[u8]) -> Result<Vec<(Descriptor, Vec<u8>)>, ReleaseSignatureError> {
    let manifest: ImageManifest = strict_json::from_slice(manifest).map_err(ReleaseSignatureError::Manifest)?;
    let readable = manifest.layers.into_iter().filter_map(|layer| {
        let signature = STANDARD.decode(layer.annotations.get(ANNOTATION)?).ok()?;
        (layer.media_type == PAYLOAD_MEDIA_TYPE && layer.size <= PAYLOAD_BYTES).then_some((layer, signature))
    });
    Ok(readable.take(SIGNATURES).collect())
}

/// Whether `payload` names `digest` and is signed by one of the keys.
#[must_use]
pub fn is_by_one_of(keys: &[PublicKey], digest: Digest, payload: &[u8], signature: &[u8]) -> bool {
    let Ok(signature) = Signature::from_slice(signature) else { return false };
    let is_signed = keys.iter().any(|key| key.verifying_key().verify_strict(payload, &signature).is_ok());
    is_signed
        && strict_json::from_slice::<Payload>(payload)
            .is_ok_and(|it| it.critical.kind == PAYLOAD_TYPE && it.critical.image.digest == digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(keys: &[PublicKey], digest: Digest, image: &SignatureImage) -> bool {
        let found = candidates(&image.manifest).unwrap();
        found.iter().any(|(layer, signature)| {
            assert_eq!(layer.digest, Digest::of(&image.payload));
            is_by_one_of(keys, digest, &image.payload, signature)
        })
    }

    #[test]
    fn signature_is_for_one_digest_by_one_of_the_keys() {
        let [ours, theirs] = [[1; 32], [2; 32]].map(|seed| SigningKey::from_bytes(&seed));
        let [our_key, their_key] = [PublicKey::from(&ours), PublicKey::from(&theirs)];
        let digest = Digest::of(b"a manifest");
        let image = sign(&ours, digest).unwrap();
        assert_eq!(sign(&ours, digest).unwrap().manifest, image.manifest, "the same inputs, the same bytes");
        assert!(check(&[their_key, our_key], digest, &image));
        assert!(!check(&[their_key], digest, &image), "a foreign key");
        assert!(!check(&[], digest, &image), "no key");
        assert!(!check(&[our_key], Digest::of(b"another"), &image), "the signature of another package");
        let forged = SignatureImage { payload: image.payload.iter().map(|byte| byte ^ 1).collect(), ..image };
        assert!(!is_by_one_of(&[our_key], digest, &forged.payload, &ours.sign(&image.payload).to_bytes()));
    }

    #[test]
    fn signed_document_of_another_type_is_no_signature() {
        let key = SigningKey::from_bytes(&[1; 32]);
        let digest = Digest::of(b"a manifest");
        let image = sign(&key, digest).unwrap();
        let other = String::from_utf8(image.payload).unwrap().replace(PAYLOAD_TYPE, "another document");
        let signature = key.sign(other.as_bytes()).to_bytes();
        assert!(!is_by_one_of(&[PublicKey::from(&key)], digest, other.as_bytes(), &signature));
    }
}
