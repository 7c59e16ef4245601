//! `gpuaas-package`: makes, signs and pushes the agent's package (`deploy/package`).

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use agent_package::build::{BuildError, Inputs, build};
use agent_package::chain;
use agent_package::registry::{Credential, Location, Registry, push_layout};
use clap::{Parser, Subcommand};
use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::DecodePrivateKey as _;
use secrecy::SecretString;
use wire::PublicKey;
use wire::package::{Reference, pull_account};

/// Makes, signs and pushes the agent's package.
#[derive(Debug, Parser)]
#[command(name = "gpuaas-package", version)]
struct Flags {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Writes the package as an OCI image layout, and prints the digest by which it is pulled
    Build {
        /// Version of the agent: the package's tag
        #[arg(long)]
        version: String,
        /// Machines for which the programs were compiled, as `uname -m` prints it
        #[arg(long, default_value = std::env::consts::ARCH)]
        architecture: String,
        /// A program of the package; once for each
        #[arg(long)]
        program: Vec<PathBuf>,
        /// Folder with the units
        #[arg(long)]
        units: PathBuf,
        /// Release key, Ed25519, PKCS #8 PEM; without it the package is not signed, and no node installs it
        #[arg(long)]
        key: Option<PathBuf>,
        /// Folder for the layout; it must be empty
        #[arg(long)]
        out: PathBuf,
    },
    /// Pushes a layout to a repository
    Push {
        #[arg(long)]
        layout: PathBuf,
        /// Repository, such as registry.example:5000/gpuaas/agent
        #[arg(long)]
        to: Reference,
        /// Trust anchor of the registry, PEM
        #[arg(long)]
        ca: PathBuf,
        /// File with `user:password` of an account that may push
        #[arg(long)]
        account_file: Option<PathBuf>,
        /// Give up after this long
        #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
        deadline_seconds: u64,
    },
    /// Prints the public key of a release key, as bundles have it
    PublicKey {
        #[arg(long)]
        key: PathBuf,
    },
}

fn main() -> ExitCode {
    let done = match Flags::parse().command {
        Command::Build { version, architecture, program, units, key, out } => {
            let inputs = Inputs { version: &version, architecture: &architecture, programs: program, units };
            make(&inputs, key.as_deref(), &out)
        }
        Command::Push { layout, to, ca, account_file, deadline_seconds } => {
            push(&layout, &to, &ca, account_file.as_deref(), Duration::from_secs(deadline_seconds))
        }
        Command::PublicKey { key } => read_key(&key).map(|key| PublicKey::from(&key).to_string()),
    };
    match done {
        Ok(text) => {
            let _ = writeln!(std::io::stdout(), "{text}");
            ExitCode::SUCCESS
        }
        Err(text) => {
            let _ = writeln!(std::io::stderr(), "gpuaas-package: {text}");
            ExitCode::FAILURE
        }
    }
}

fn make(inputs: &Inputs<'_>, key: Option<&Path>, out: &Path) -> Result<String, String> {
    if fs::read_dir(out).is_ok_and(|mut found| found.next().is_some()) {
        return Err(format!("{} is not empty; name another folder", out.display()));
    }
    let key = key.map(read_key).transpose()?;
    let digest = build(inputs, key.as_ref(), out).map_err(|error: BuildError| chain(&error))?;
    Ok(digest.to_string())
}

fn push(layout: &Path, to: &Reference, ca: &Path, account: Option<&Path>, within: Duration) -> Result<String, String> {
    let credential = match account {
        Some(path) => {
            let text = read_text(path)?;
            let account =
                pull_account(text.trim()).ok_or_else(|| format!("{} is not user:password", path.display()))?;
            Credential::Account { user: account.0.to_owned(), password: SecretString::from(account.1) }
        }
        None => Credential::Nothing,
    };
    let location = Location {
        host: to.registry.clone(),
        base: format!("https://{}/v2/{}", to.registry, to.repository),
        authorities_pem: read_text(ca)?,
    };
    let registry = Registry::new(location, None, credential, Instant::now() + within);
    let mut registry = registry.map_err(|error| chain(&error))?;
    let pushed = push_layout(&mut registry, layout).map_err(|error| chain(&error))?;
    let lines = pushed.iter().map(|(tag, digest)| format!("{to}:{tag} {digest}"));
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

fn read_key(path: &Path) -> Result<SigningKey, String> {
    SigningKey::from_pkcs8_pem(&read_text(path)?).map_err(|error| {
        format!("{} is no Ed25519 key, PKCS #8 PEM (`openssl genpkey -algorithm ed25519`): {error}", path.display())
    })
}

fn read_text(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}
