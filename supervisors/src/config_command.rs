//! `gpuaas config`: checks settings before anything starts with them.

use crate::config::installed_settings::set_by_the_unit;
use crate::config::{Config, env_file};
use std::io::Write;
use std::path::PathBuf;

/// The file to check.
#[derive(Debug, clap::Args)]
pub struct ConfigArgs {
    /// Check the settings of this environment file, and the files that they name; nothing is connected to. Variables that the file does not
    /// set are taken from this command's environment; kek, tls.pem and tls.key beside the file are taken as the unit passes them.
    #[arg(long, value_name = "FILE", required = true)]
    check: PathBuf,
}

/// Checks the file.
///
/// # Errors
/// [`crate::config::ConfigError`] with every problem.
pub fn run(args: &ConfigArgs) -> anyhow::Result<()> {
    let at = args.check.display();
    let text = env_file::read(&args.check)?;
    let outside = |name: &str| std::env::var(name).ok().or_else(|| set_by_the_unit(&args.check, name));
    let count = Config::check(&text, &outside)?;
    writeln!(std::io::stdout(), "{at}: {count} settings, and nothing is wrong with them")?;
    Ok(())
}
