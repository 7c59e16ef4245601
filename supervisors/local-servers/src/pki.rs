//! The certificates of a development environment, by one authority of its own.
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

use crate::private_files;

/// How long server certificates are valid, which are made at each start: longer than a development environment stays up.
const VALID_FOR: Duration = Duration::days(90);
/// How long the authority is valid: longer than the data of an environment is kept.
const AUTHORITY_VALID_FOR: Duration = Duration::days(3650);

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
    /// Makes an authority whose certificate is `folder/ca.pem`. Its key never touches the disk.
    pub fn create(folder: &Path) -> anyhow::Result<Self> {
        let key = KeyPair::generate()?;
        let certificate_pem = authority_params()?.self_signed(&key)?.pem();
        Self::of(folder, key, certificate_pem)
    }

    /// The authority of an earlier start, or a new one that later starts find: agents know it.
    pub fn restore(folder: &Path) -> anyhow::Result<Self> {
        private_files::private_folder(folder)?;
        let key_path = folder.join("ca.key");
        let there = std::fs::read_to_string(&key_path).ok().zip(std::fs::read_to_string(folder.join("ca.pem")).ok());
        if let Some((key, certificate_pem)) = there {
            let key = KeyPair::from_pem(&key).context("the authority's key cannot be read; start over with --fresh")?;
            return Self::of(folder, key, certificate_pem);
        }
        let key = KeyPair::generate()?;
        let certificate_pem = authority_params()?.self_signed(&key)?.pem();
        let text = key.serialize_pem();
        let authority = Self::of(folder, key, certificate_pem)?;
        private_files::write_private(&key_path, text.as_bytes())?;
        Ok(authority)
    }

    fn of(folder: &Path, key: KeyPair, certificate_pem: String) -> anyhow::Result<Self> {
        private_files::private_folder(folder)?;
        let certificate_path = folder.join("ca.pem");
        private_files::write_public(&certificate_path, certificate_pem.as_bytes())?;
        let params = authority_params()?;
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
        self.certificate(name, vec![ExtendedKeyUsagePurpose::ServerAuth], OffsetDateTime::now_utc() + VALID_FOR)
    }

    /// One that ends sooner, or later.
    pub fn server_certificate_for(&self, name: &str, time: std::time::Duration) -> anyhow::Result<ServerCertificate> {
        self.certificate(name, vec![ExtendedKeyUsagePurpose::ServerAuth], OffsetDateTime::now_utc() + time)
    }

    /// The same, which its server also presents as a client of its peers.
    pub fn peer_certificate(&self, name: &str) -> anyhow::Result<ServerCertificate> {
        let uses = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        self.certificate(name, uses, OffsetDateTime::now_utc() + VALID_FOR)
    }

    fn certificate(
        &self,
        name: &str,
        uses: Vec<ExtendedKeyUsagePurpose>,
        not_after: OffsetDateTime,
    ) -> anyhow::Result<ServerCertificate> {
        let key = KeyPair::generate()?;
        let mut params = params(&format!("gpuaas development {name}"), &NAMES)?;
        params.not_after = not_after;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = uses;
        let certificate = params.signed_by(&key, &self.issuer).context("cannot sign a server certificate")?;
        let files = ServerCertificate {
            certificate_path: self.folder.join(format!("{name}.pem")),
            key_path: self.folder.join(format!("{name}.key")),
        };
        private_files::write_public(&files.certificate_path, certificate.pem().as_bytes())?;
        private_files::write_private(&files.key_path, key.serialize_pem().as_bytes())?;
        Ok(files)
    }
}

fn authority_params() -> anyhow::Result<CertificateParams> {
    let mut params = params("gpuaas development authority", &[])?;
    params.not_after = params.not_before + AUTHORITY_VALID_FOR;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
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
