//! The certificates of a development environment: one authority, made at each start, whose key never touches the disk.
//!
//! It signs the *servers* (Postgres, NATS, the control plane's two listeners). Node certificates come from the control
//! plane's own authority, which is another one.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use time::{Duration, OffsetDateTime};

use super::files;

/// How long the authority and its certificates are valid: longer than anybody leaves a development environment up.
const VALID_FOR: Duration = Duration::days(90);

/// The names under which everything here is reached.
const NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// A certificate authority for servers on this machine's loopback addresses.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate_pem: String,
    certificate_path: PathBuf,
    folder: PathBuf,
}

/// A server's certificate chain and key, as PEM files.
#[derive(Debug, Clone)]
pub struct ServerCertificate {
    pub certificate_path: PathBuf,
    /// Readable by this user alone.
    pub key_path: PathBuf,
}

impl Authority {
    /// Makes an authority whose certificate is `folder/ca.pem`.
    pub fn create(folder: &Path) -> anyhow::Result<Self> {
        files::private_folder(folder)?;
        let key = KeyPair::generate()?;
        let mut params = params("gpuaas development authority", &[])?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate_pem = params.self_signed(&key)?.pem();
        let certificate_path = folder.join("ca.pem");
        files::write_public(&certificate_path, certificate_pem.as_bytes())?;
        Ok(Self { issuer: Issuer::new(params, key), certificate_pem, certificate_path, folder: folder.to_owned() })
    }

    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// The trust anchor for every server that this authority signed.
    pub fn certificate_path(&self) -> &Path {
        &self.certificate_path
    }

    /// A certificate for `localhost`, `127.0.0.1` and `::1`, with server authentication as its only use.
    pub fn server_certificate(&self, name: &str) -> anyhow::Result<ServerCertificate> {
        let key = KeyPair::generate()?;
        let mut params = params(&format!("gpuaas development {name}"), &NAMES)?;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params.signed_by(&key, &self.issuer).context("cannot sign a server certificate")?;
        let files = ServerCertificate {
            certificate_path: self.folder.join(format!("{name}.pem")),
            key_path: self.folder.join(format!("{name}.key")),
        };
        files::write_public(&files.certificate_path, certificate.pem().as_bytes())?;
        files::write_private(&files.key_path, key.serialize_pem().as_bytes())?;
        Ok(files)
    }
}

fn params(common_name: &str, names: &[&str]) -> anyhow::Result<CertificateParams> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    let now = OffsetDateTime::now_utc();
    params.not_before = now - Duration::hours(1);
    params.not_after = now + VALID_FOR;
    Ok(params)
}
