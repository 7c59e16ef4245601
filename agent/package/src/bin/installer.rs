//! `gpuaas-installer`: pulls, verifies and installs the agent's package on a node. Bootstrap scripts carry it as a static program.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use agent_package::chain;
use agent_package::install::{InstallError, InstallTarget, install};
use agent_package::source::{NodeCredential, PackageSource};
use clap::Parser;
use wire::bundle::BootstrapBundle;

/// The environment file is incomplete or wrong; clap uses the same code for flags.
const WRONG_CONFIGURATION: u8 = 2;
const ENV_FILE_BYTES: u64 = 1024 * 1024;

/// Installs the agent's package that the environment file of the bootstrap bundle names, and makes it the current one.
///
/// It pulls by digest, verifies the release signature and every byte, and changes nothing that is in use until the new version is whole.
/// It neither starts nor restarts a unit.
#[derive(Debug, Parser)]
#[command(name = "gpuaas-installer", version)]
struct Flags {
    /// Environment file of the bootstrap bundle
    #[arg(long, default_value = wire::package::DEFAULT_ENV_FILE)]
    env_file: PathBuf,
    /// The machine has no identity yet: present the enrollment token, which is not spent, and not the certificate
    #[arg(long)]
    first_install: bool,
    /// Where systemd's units are written
    #[arg(long, default_value = "/etc/systemd/system")]
    unit_folder: PathBuf,
    /// Give up after this long
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    deadline_seconds: u64,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    let source = match read(&flags) {
        Ok(source) => source,
        Err(error) => {
            say(&format!("configuration: {error}"));
            return ExitCode::from(WRONG_CONFIGURATION);
        }
    };
    match run(source, &flags) {
        Ok(text) => {
            // A closed output changes nothing.
            let _ = writeln!(std::io::stdout(), "{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            say(&format!("{}: {}", error.code(), chain(&error)));
            ExitCode::FAILURE
        }
    }
}

fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "gpuaas-installer: {text}");
}

fn read(flags: &Flags) -> Result<PackageSource, String> {
    let shown = flags.env_file.display();
    let length = std::fs::metadata(&flags.env_file).map_err(|error| format!("{shown}: {error}"))?.len();
    if length > ENV_FILE_BYTES {
        return Err(format!("{shown} has {length} bytes, more than the environment file of a bundle can have"));
    }
    let text = std::fs::read_to_string(&flags.env_file).map_err(|error| format!("{shown}: {error}"))?;
    let bundle = BootstrapBundle::from_env_file(&text).map_err(|error| format!("{shown}: {}", chain(&error)))?;
    let credential = if flags.first_install { NodeCredential::EnrollmentToken } else { NodeCredential::Certificate };
    PackageSource::from_bundle(&bundle, credential).map_err(|error| chain(&error))
}

fn run(source: PackageSource, flags: &Flags) -> Result<String, InstallError> {
    let target = InstallTarget {
        install_root: source.install_root.clone(),
        env_file: source.env_file.clone(),
        unit: source.unit.clone(),
        unit_folder: flags.unit_folder.clone(),
        release_keys: source.release_keys.clone(),
    };
    let digest = source.digest;
    let mut registry = source.open(Instant::now() + Duration::from_secs(flags.deadline_seconds))?;
    let installed = install(digest, &mut registry, &target)?;
    let how = if installed.was_there { "was installed" } else { "is installed" };
    Ok(format!("version {} ({digest}) {how} in {}", installed.version, target.install_root.display()))
}
