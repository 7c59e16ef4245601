//! The certificate authority of the nodes.
//!
//! It certifies a public key for one node and a validity period. Of a certificate request only the key is used: names, extensions and CA
//! flags in it are ignored. The authority's own key leaves this module once, for the caller to encrypt and store.

use chrono::{DateTime, Duration, SubsecRound, Utc};
use rand::Rng;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType, SerialNumber, SubjectPublicKeyInfo,
};
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest as _, Sha256};
use thiserror::Error;
use time::OffsetDateTime;
use uuid::Uuid;
use x509_parser::{
    certification_request::X509CertificationRequest,
    extensions::ParsedExtension,
    oid_registry::{
        OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY, OID_NIST_EC_P384, OID_PKCS1_RSAENCRYPTION, OID_PKCS1_SHA256WITHRSA,
        OID_PKCS1_SHA384WITHRSA, OID_PKCS1_SHA512WITHRSA, OID_SIG_ECDSA_WITH_SHA256, OID_SIG_ECDSA_WITH_SHA384,
        OID_SIG_ED25519,
    },
    pem::parse_x509_pem,
    prelude::FromDer,
    public_key::PublicKey,
    x509::SubjectPublicKeyInfo as ParsedKey,
};
use zeroize::Zeroizing;

use crate::trust::node_certificate::TrustDomain;

/// The longest request read, in bytes; one with an RSA key of 8,192 bits has 3 kB.
const MAX_CSR_LEN: usize = 16 * 1024;
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;
/// Clocks of nodes may run behind by this much.
const BACKDATED_BY: Duration = Duration::minutes(1);

/// A certificate authority for node certificates.
pub struct NodeCa {
    issuer: Issuer<'static, KeyPair>,
    authority: CaCertificate,
    trust_domain: TrustDomain,
}

/// The public part of an authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaCertificate {
    /// The first 16 hexadecimal digits of the certificate's SHA-256.
    pub id: String,
    pub certificate_pem: String,
    /// The subject key identifier, by which its certificates name it.
    pub key_id: String,
    pub not_after: DateTime<Utc>,
}

impl CaCertificate {
    /// Reads a certificate authority's certificate.
    ///
    /// # Errors
    /// Where it cannot be read, or is not an authority's.
    pub fn read(certificate_pem: &str) -> Result<Self, NodeCaError> {
        let (_, block) = parse_x509_pem(certificate_pem.as_bytes()).map_err(NodeCaError::of)?;
        let certificate = block.parse_x509().map_err(NodeCaError::of)?;
        if !certificate.is_ca() {
            return Err(NodeCaError::of("the certificate is not a certificate authority's"));
        }
        let key_id = certificate.iter_extensions().find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::SubjectKeyIdentifier(id) => Some(hex::encode(id.0)),
            _ => None,
        });
        let ends = certificate.validity().not_after.timestamp();
        Ok(Self {
            id: hex::encode(&Sha256::digest(&block.contents)[..8]),
            certificate_pem: certificate_pem.to_owned(),
            key_id: key_id.ok_or_else(|| NodeCaError::of("the certificate has no subject key identifier"))?,
            not_after: DateTime::from_timestamp(ends, 0)
                .ok_or_else(|| NodeCaError::of("the certificate's end is no time"))?,
        })
    }
}

/// A new authority and its private key in PKCS#8 PEM, to be stored encrypted.
pub struct CreatedNodeCa {
    pub ca: NodeCa,
    pub key_pem: SecretString,
}

/// A certificate that was issued.
#[derive(Clone, Debug)]
pub struct IssuedCertificate {
    pub certificate_pem: String,
    /// The certificates between the node's and the trust anchor, the anchor last.
    pub chain_pem: String,
    /// Lower-case hexadecimal, as [`crate::trust::node_certificate::NodeCertificate`] reads it.
    pub serial: String,
    pub not_after: DateTime<Utc>,
    /// The [`CaCertificate::id`] of the authority that certified it.
    pub authority: String,
}

/// Why no certificate was issued.
#[derive(Debug, Error)]
pub enum IssueError {
    #[error("the certificate request cannot be used: {0}")]
    Request(#[from] CsrError),
    #[error("the certificate would outlive the authority, which ends at {0}")]
    AuthorityEnds(DateTime<Utc>),
    #[error("the certificate would end before it begins")]
    NoValidity,
    #[error("the certificate could not be signed")]
    Sign(#[source] rcgen::Error),
}

/// What is wrong with a certificate request. The messages are for its author.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CsrError {
    #[error("it is longer than {MAX_CSR_LEN} bytes")]
    TooLong,
    #[error("it must be exactly one PEM block CERTIFICATE REQUEST (PKCS#10)")]
    Malformed,
    #[error("its signature does not verify")]
    Signature,
    #[error("its signature algorithm is not accepted; use Ed25519, ECDSA or RSA with SHA-256 or better")]
    SignatureAlgorithm,
    #[error("its key type is not accepted; use Ed25519, ECDSA P-256 or P-384, or RSA")]
    KeyType,
    #[error("an RSA key needs 2048 to 8192 bits")]
    RsaSize,
}

/// Why an authority could not be made or read.
#[derive(Debug, Error)]
#[error("the node certificate authority cannot be used")]
pub struct NodeCaError(#[source] Box<dyn std::error::Error + Send + Sync>);

impl NodeCaError {
    fn of(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(source.into())
    }
}

impl NodeCa {
    /// Makes an authority with a fresh ECDSA P-256 key.
    ///
    /// # Errors
    /// Where the key cannot be made or the certificate not be signed.
    pub fn create(
        trust_domain: TrustDomain,
        now: DateTime<Utc>,
        not_after: DateTime<Utc>,
    ) -> Result<CreatedNodeCa, NodeCaError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(NodeCaError::of)?;
        let key_pem = SecretString::from(key.serialize_pem());
        let mut params = CertificateParams::default();
        let serial = random_serial();
        // Of two authorities with one name, a proxy's TLS library may try the wrong one alone.
        let number = hex::encode(&serial.to_bytes()[1..5]);
        params.distinguished_name = named(&format!("{trust_domain} node CA {number}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.serial_number = Some(serial);
        params.not_before = offset(now - BACKDATED_BY).map_err(NodeCaError::of)?;
        params.not_after = offset(not_after).map_err(NodeCaError::of)?;
        let certificate_pem = params.self_signed(&key).map_err(NodeCaError::of)?.pem();
        Ok(CreatedNodeCa { ca: Self::load(trust_domain, &certificate_pem, &key_pem)?, key_pem })
    }

    /// Reads an authority back from its certificate and key.
    ///
    /// # Errors
    /// Where one of them cannot be read, they do not belong together, or the certificate is not an authority's.
    pub fn load(trust_domain: TrustDomain, certificate_pem: &str, key_pem: &SecretString) -> Result<Self, NodeCaError> {
        let key = KeyPair::from_pem(key_pem.expose_secret()).map_err(NodeCaError::of)?;
        let authority = CaCertificate::read(certificate_pem)?;
        let (_, block) = parse_x509_pem(certificate_pem.as_bytes()).map_err(NodeCaError::of)?;
        let certificate = block.parse_x509().map_err(NodeCaError::of)?;
        if certificate.public_key().subject_public_key.data != rcgen::PublicKeyData::der_bytes(&key) {
            return Err(NodeCaError::of("the key is not the certificate's"));
        }
        let issuer = Issuer::from_ca_cert_pem(certificate_pem, key).map_err(NodeCaError::of)?;
        Ok(Self { issuer, authority, trust_domain })
    }

    /// The trust anchor that servers verify node certificates against.
    #[must_use]
    pub fn certificate_pem(&self) -> &str {
        &self.authority.certificate_pem
    }

    #[must_use]
    pub const fn authority(&self) -> &CaCertificate {
        &self.authority
    }

    /// Certifies the key of a request for a node, from a minute before `not_before` until `not_after`, both cut to whole
    /// seconds.
    ///
    /// # Errors
    /// [`IssueError::Request`] is the requester's fault, the rest is the operator's.
    pub fn issue(
        &self,
        node_id: Uuid,
        csr_pem: &str,
        not_before: DateTime<Utc>,
        not_after: DateTime<Utc>,
    ) -> Result<IssuedCertificate, IssueError> {
        let key = key_of_request(csr_pem)?;
        if not_after <= not_before {
            return Err(IssueError::NoValidity);
        }
        if not_after > self.authority.not_after {
            return Err(IssueError::AuthorityEnds(self.authority.not_after));
        }
        self.certify(node_id, &key, &random_serial(), not_before, not_after)
    }

    /// Everything that a certificate holds: the request is not among the arguments.
    fn certify(
        &self,
        node_id: Uuid,
        key: &SubjectPublicKeyInfo,
        serial: &SerialNumber,
        not_before: DateTime<Utc>,
        not_after: DateTime<Utc>,
    ) -> Result<IssuedCertificate, IssueError> {
        let not_after = not_after.trunc_subsecs(0);
        let uri = self.trust_domain.node_uri(node_id);
        let mut params = CertificateParams::default();
        params.distinguished_name = named(&node_id.to_string());
        params.subject_alt_names = vec![SanType::URI(uri.try_into().map_err(IssueError::Sign)?)];
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        params.serial_number = Some(serial.clone());
        params.not_before = offset(not_before - BACKDATED_BY).map_err(|_| IssueError::NoValidity)?;
        params.not_after = offset(not_after).map_err(|_| IssueError::NoValidity)?;
        let certificate = params.signed_by(key, &self.issuer).map_err(IssueError::Sign)?;
        Ok(IssuedCertificate {
            certificate_pem: certificate.pem(),
            chain_pem: self.authority.certificate_pem.clone(),
            authority: self.authority.id.clone(),
            serial: hex::encode(serial.to_bytes()),
            not_after,
        })
    }
}

fn named(common_name: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    name
}

/// 20 bytes, the most that RFC 5280 allows, of which all but two bits are random: positive, and of constant length.
fn random_serial() -> SerialNumber {
    let mut bytes = Zeroizing::new([0_u8; 20]);
    rand::rng().fill_bytes(bytes.as_mut());
    bytes[0] = (bytes[0] & 0x7f) | 0x40;
    SerialNumber::from_slice(bytes.as_ref())
}

fn offset(at: DateTime<Utc>) -> Result<OffsetDateTime, time::error::ComponentRange> {
    OffsetDateTime::from_unix_timestamp(at.timestamp())
}

/// Extracts the public key of a request whose signature proves that its sender holds the private one.
fn key_of_request(csr_pem: &str) -> Result<SubjectPublicKeyInfo, CsrError> {
    if csr_pem.len() > MAX_CSR_LEN {
        return Err(CsrError::TooLong);
    }
    if !csr_pem.trim_start().starts_with("-----BEGIN ") {
        return Err(CsrError::Malformed);
    }
    let (rest, block) = parse_x509_pem(csr_pem.as_bytes()).map_err(|_| CsrError::Malformed)?;
    let alone = rest.iter().all(u8::is_ascii_whitespace);
    if !alone || !matches!(block.label.as_str(), "CERTIFICATE REQUEST" | "NEW CERTIFICATE REQUEST") {
        return Err(CsrError::Malformed);
    }
    let (rest, request) = X509CertificationRequest::from_der(&block.contents).map_err(|_| CsrError::Malformed)?;
    if !rest.is_empty() {
        return Err(CsrError::Malformed);
    }
    let signed_with = &request.signature_algorithm.algorithm;
    let strong = [
        OID_SIG_ED25519,
        OID_SIG_ECDSA_WITH_SHA256,
        OID_SIG_ECDSA_WITH_SHA384,
        OID_PKCS1_SHA256WITHRSA,
        OID_PKCS1_SHA384WITHRSA,
        OID_PKCS1_SHA512WITHRSA,
    ];
    let key = &request.certification_request_info.subject_pki;
    check_key(key)?;
    if !strong.contains(signed_with) {
        return Err(CsrError::SignatureAlgorithm);
    }
    request.verify_signature().map_err(|_| CsrError::Signature)?;
    SubjectPublicKeyInfo::from_der(key.raw).map_err(|_| CsrError::KeyType)
}

fn check_key(key: &ParsedKey<'_>) -> Result<(), CsrError> {
    let kind = &key.algorithm.algorithm;
    let bits = &key.subject_public_key.data;
    if *kind == OID_SIG_ED25519 {
        return if bits.len() == 32 { Ok(()) } else { Err(CsrError::KeyType) };
    }
    if *kind == OID_KEY_TYPE_EC_PUBLIC_KEY {
        let curve = key
            .algorithm
            .parameters
            .as_ref()
            .and_then(|parameters| parameters.as_oid().ok())
            .ok_or(CsrError::KeyType)?;
        let uncompressed = bits.first() == Some(&4);
        let fits = (curve == OID_EC_P256 && bits.len() == 65) || (curve == OID_NIST_EC_P384 && bits.len() == 97);
        return if uncompressed && fits { Ok(()) } else { Err(CsrError::KeyType) };
    }
    if *kind == OID_PKCS1_RSAENCRYPTION {
        let Ok(PublicKey::RSA(rsa)) = key.parsed() else { return Err(CsrError::KeyType) };
        let significant = rsa.modulus.iter().skip_while(|byte| **byte == 0).count();
        let first = rsa.modulus.iter().find(|byte| **byte != 0).copied().unwrap_or(0);
        let size = (significant * 8).saturating_sub(first.leading_zeros() as usize);
        return if RSA_BITS.contains(&size) { Ok(()) } else { Err(CsrError::RsaSize) };
    }
    Err(CsrError::KeyType)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rcgen::{PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256, PublicKeyData, RsaKeySize};
    use x509_parser::{certificate::X509Certificate, extensions::GeneralName};

    use super::*;
    use crate::trust::node_certificate::NodeCertificate;

    fn domain() -> TrustDomain {
        TrustDomain::parse("gpu.example").unwrap()
    }

    fn ca() -> NodeCa {
        NodeCa::create(domain(), Utc::now(), Utc::now() + Duration::days(3650)).unwrap().ca
    }

    fn csr(key: &KeyPair, params: CertificateParams) -> String {
        params.serialize_request(key).unwrap().pem().unwrap()
    }

    fn plain_csr(key: &KeyPair) -> String {
        csr(key, CertificateParams::default())
    }

    fn hostile_csr(key: &KeyPair) -> String {
        let mut params = CertificateParams::new(vec!["evil.example".to_owned()]).unwrap();
        params
            .subject_alt_names
            .push(SanType::URI("spiffe://gpu.example/node/00000000-0000-0000-0000-000000000001".try_into().unwrap()));
        params.distinguished_name = named("hostile name");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::Any];
        csr(key, params)
    }

    fn issue(ca: &NodeCa, node_id: Uuid, csr_pem: &str) -> Result<IssuedCertificate, IssueError> {
        ca.issue(node_id, csr_pem, Utc::now(), Utc::now() + Duration::hours(24))
    }

    fn refusal(csr_pem: &str) -> CsrError {
        match issue(&ca(), Uuid::nil(), csr_pem) {
            Err(IssueError::Request(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    fn der(pem: &str) -> Vec<u8> {
        parse_x509_pem(pem.as_bytes()).unwrap().1.contents
    }

    #[test]
    fn a_certificate_is_for_the_node_for_clients_and_for_its_time() {
        let (ca, node_id, key) = (ca(), Uuid::now_v7(), KeyPair::generate_for(&PKCS_ED25519).unwrap());
        let now = Utc::now();
        let issued = ca.issue(node_id, &plain_csr(&key), now, now + Duration::hours(24)).unwrap();
        let der = der(&issued.certificate_pem);
        let (_, certificate) = X509Certificate::from_der(&der).unwrap();
        assert_eq!(certificate.validity().not_before.timestamp(), now.timestamp() - 60);
        assert_eq!(certificate.validity().not_after.timestamp(), issued.not_after.timestamp());
        assert_eq!(issued.not_after.timestamp(), (now + Duration::hours(24)).timestamp());
        let usage = certificate.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.client_auth && !usage.server_auth && !usage.any && !usage.code_signing);
        assert!(!certificate.is_ca());
        let names = &certificate.subject_alternative_name().unwrap().unwrap().value.general_names;
        assert_eq!(names, &[GeneralName::URI(&format!("spiffe://gpu.example/node/{node_id}"))]);
        let read = NodeCertificate::parse(&der, &domain()).unwrap();
        assert_eq!(
            (read.node_id, read.serial.as_str(), read.not_after),
            (node_id, issued.serial.as_str(), issued.not_after)
        );
        assert_eq!(
            (read.authority.as_str(), issued.authority.as_str()),
            (&*ca.authority().key_id, &*ca.authority().id)
        );
        assert!(issued.serial.len() >= 32);
        assert!(issued.chain_pem.contains("BEGIN CERTIFICATE"));
    }

    /// With one serial, certificates from a plain and from a hostile request over the same key are the same bytes.
    #[test]
    fn certificate_takes_only_the_key_of_the_request() {
        let (ca, node_id, now) = (ca(), Uuid::now_v7(), Utc::now());
        for algorithm in [&PKCS_ED25519, &PKCS_ECDSA_P256_SHA256, &PKCS_ECDSA_P384_SHA384, &PKCS_RSA_SHA256] {
            let key = KeyPair::generate_for(algorithm).unwrap();
            let serial = random_serial();
            let signed_part = |request: &str| {
                let taken = key_of_request(request).unwrap();
                assert_eq!(taken.der_bytes(), key.der_bytes());
                let issued = ca.certify(node_id, &taken, &serial, now, now + Duration::hours(1)).unwrap();
                let der = der(&issued.certificate_pem);
                X509Certificate::from_der(&der).unwrap().1.tbs_certificate.as_ref().to_vec()
            };
            let hostile = signed_part(&hostile_csr(&key));
            assert_eq!(signed_part(&plain_csr(&key)), hostile);
            for trace in ["hostile", "evil", "00000000-0000-0000-0000-000000000001"] {
                assert!(!hostile.windows(trace.len()).any(|window| window == trace.as_bytes()));
            }
        }
    }

    #[test]
    fn serials_are_random_and_positive() {
        let serials: std::collections::HashSet<Vec<u8>> = (0..500).map(|_| random_serial().to_bytes()).collect();
        assert_eq!(serials.len(), 500);
        assert!(serials.iter().all(|serial| serial.len() == 20 && serial[0] < 0x80));
    }

    #[test]
    fn weak_and_unknown_keys_are_refused() {
        let weak = openssl_csr(&["-newkey", "rsa:1024"]);
        assert_eq!(refusal(&weak), CsrError::RsaSize);
        let almost = openssl_csr(&["-newkey", "rsa:2047"]);
        assert_eq!(refusal(&almost), CsrError::RsaSize);
        let curve = openssl_csr(&["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:secp256k1"]);
        assert_eq!(refusal(&curve), CsrError::KeyType);
        let pss = openssl_csr(&["-newkey", "rsa-pss"]);
        assert_eq!(refusal(&pss), CsrError::KeyType);
        let sha1 = openssl_csr(&["-newkey", "rsa:2048", "-sha1"]);
        assert_eq!(refusal(&sha1), CsrError::SignatureAlgorithm);
        let good = openssl_csr(&["-newkey", "rsa:2048", "-subj", "/CN=another/O=Someone"]);
        assert!(issue(&ca(), Uuid::nil(), &good).is_ok());
        let generated = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_3072).unwrap();
        assert!(issue(&ca(), Uuid::nil(), &plain_csr(&generated)).is_ok());
    }

    fn openssl_csr(arguments: &[&str]) -> String {
        let made = Command::new("openssl")
            .args(["req", "-new", "-nodes", "-keyout", "/dev/null", "-subj", "/CN=x"])
            .args(arguments)
            .output()
            .expect("openssl is installed wherever this is built");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        String::from_utf8(made.stdout).unwrap()
    }

    #[test]
    fn request_with_a_signature_of_another_key_is_refused() {
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let mut bytes = der(&plain_csr(&key));
        *bytes.last_mut().unwrap() ^= 1;
        assert_eq!(refusal(&pem("CERTIFICATE REQUEST", &bytes)), CsrError::Signature);
        let (mine, another) = (key.der_bytes().to_vec(), KeyPair::generate_for(&PKCS_ED25519).unwrap());
        let mut swapped = der(&plain_csr(&key));
        let at = swapped.windows(32).position(|window| window == mine).unwrap();
        swapped[at..at + 32].copy_from_slice(another.der_bytes());
        assert_eq!(refusal(&pem("CERTIFICATE REQUEST", &swapped)), CsrError::Signature);
    }

    fn pem(label: &str, der: &[u8]) -> String {
        use base64::{Engine, engine::general_purpose::STANDARD};
        let lines: Vec<String> =
            STANDARD.encode(der).as_bytes().chunks(64).map(|line| String::from_utf8_lossy(line).into_owned()).collect();
        format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
    }

    #[test]
    fn text_that_is_not_one_certificate_request_is_refused() {
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let good = plain_csr(&key);
        let mut trailing = der(&good);
        trailing.push(0);
        for bad in [
            String::new(),
            "not pem".into(),
            format!("{good}{good}"),
            format!("junk\n{good}"),
            good.replace("CERTIFICATE REQUEST", "CERTIFICATE"),
            pem("CERTIFICATE REQUEST", b""),
            pem("CERTIFICATE REQUEST", &trailing),
            key.serialize_pem(),
            ca().certificate_pem().to_owned(),
        ] {
            assert_eq!(refusal(&bad), CsrError::Malformed, "{bad}");
        }
        assert_eq!(refusal(&"A".repeat(MAX_CSR_LEN + 1)), CsrError::TooLong);
    }

    #[test]
    fn no_certificate_outlives_the_authority_or_ends_before_it_begins() {
        let (now, key) = (Utc::now(), KeyPair::generate_for(&PKCS_ED25519).unwrap());
        let ca = NodeCa::create(domain(), now, now + Duration::hours(2)).unwrap().ca;
        assert!(matches!(
            ca.issue(Uuid::nil(), &plain_csr(&key), now, now + Duration::hours(3)),
            Err(IssueError::AuthorityEnds(_))
        ));
        assert!(matches!(ca.issue(Uuid::nil(), &plain_csr(&key), now, now), Err(IssueError::NoValidity)));
    }

    #[test]
    fn authority_is_loaded_only_with_its_own_key() {
        let created = NodeCa::create(domain(), Utc::now(), Utc::now() + Duration::days(1)).unwrap();
        assert!(NodeCa::load(domain(), created.ca.certificate_pem(), &created.key_pem).is_ok());
        let other = NodeCa::create(domain(), Utc::now(), Utc::now() + Duration::days(1)).unwrap();
        assert!(NodeCa::load(domain(), created.ca.certificate_pem(), &other.key_pem).is_err());
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let leaf =
            created.ca.issue(Uuid::nil(), &plain_csr(&key), Utc::now(), Utc::now() + Duration::hours(1)).unwrap();
        assert!(NodeCa::load(domain(), &leaf.certificate_pem, &SecretString::from(key.serialize_pem())).is_err());
        assert!(!format!("{:?}", created.key_pem).contains("PRIVATE KEY"));
    }
}
