//! The agent's package of this installation: what bundles say of it, the first program of a bare machine, and the registry that the node
//! API relays.

use crate::outbound::package_registry::PackageRegistry;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest as _, Sha256};
use std::io::Write as _;
use std::sync::Arc;
use wire::bundle::{Package, names};

/// The variable that names the first program.
pub const INSTALLER_PATH: &str = "SVC_NODE_AGENT_INSTALLER_PATH";
/// The largest first program, in bytes as it is on the disk, and compressed.
pub const INSTALLER_BYTES: u64 = 16 * 1024 * 1024;
const COMPRESSED_BYTES: usize = 4 * 1024 * 1024;
/// Characters of a line of base64, as `base64` prints it.
const LINE: usize = 76;

/// The package, as far as it is configured.
#[derive(Debug, Default)]
pub struct AgentPackage {
    pub bundled: Package,
    pub first_program: Option<FirstProgram>,
    /// Where the node API gets what it relays; `None` where nodes do not pull through it.
    pub registry: Option<PackageRegistry>,
}

impl AgentPackage {
    /// The first program, if bootstrap scripts with the package can be written.
    ///
    /// # Errors
    /// The variables that are not set.
    pub(crate) fn for_scripts(&self) -> Result<&FirstProgram, Vec<&'static str>> {
        let items = [
            (names::PACKAGE_OCI_REF, self.bundled.oci_ref.is_some()),
            (names::PACKAGE_DIGEST, self.bundled.digest.is_some()),
            (names::PACKAGE_RELEASE_KEYS, self.bundled.release_keys.is_some()),
            (INSTALLER_PATH, self.first_program.is_some()),
        ];
        let missing: Vec<&'static str> =
            items.into_iter().filter(|(_, is_set)| !is_set).map(|(name, _)| name).collect();
        self.first_program.as_ref().filter(|_| missing.is_empty()).ok_or(missing)
    }
}

/// `gpuaas-installer` as a static program, which bootstrap scripts carry.
#[derive(Clone, Debug)]
pub struct FirstProgram {
    /// gzip and base64, in lines.
    pub(crate) encoded: Arc<str>,
    /// Of the program, hexadecimal.
    pub(crate) sha256: String,
    /// On which it runs, as `uname -m` prints it.
    pub(crate) machine: &'static str,
}

/// A file that cannot be the first program.
#[derive(Debug, thiserror::Error)]
pub enum FirstProgramError {
    #[error("it is no Linux program for x86_64 or aarch64; name the static gpuaas-installer that deploy/package makes")]
    NotAProgram,
    #[error(
        "it needs other files to run (it names an interpreter); name the static gpuaas-installer that deploy/package makes"
    )]
    NotStatic,
    #[error("it has {0} bytes, compressed, more than the {COMPRESSED_BYTES} that a script carries; strip it")]
    TooLarge(usize),
    #[error("it cannot be compressed")]
    Compress(#[from] std::io::Error),
}

impl FirstProgram {
    /// # Errors
    /// [`FirstProgramError`].
    pub fn new(program: &[u8]) -> Result<Self, FirstProgramError> {
        let machine = machine(program).ok_or(FirstProgramError::NotAProgram)?;
        if names_an_interpreter(program) {
            return Err(FirstProgramError::NotStatic);
        }
        let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
        gzip.write_all(program)?;
        let compressed = gzip.finish()?;
        if compressed.len() > COMPRESSED_BYTES {
            return Err(FirstProgramError::TooLarge(compressed.len()));
        }
        let text = STANDARD.encode(compressed);
        let mut encoded = String::with_capacity(text.len() + text.len() / LINE + 1);
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let (line, after) = rest.split_at(rest.len().min(LINE));
            encoded.push_str(line);
            encoded.push('\n');
            rest = after;
        }
        Ok(Self { encoded: encoded.into(), sha256: hex::encode(Sha256::digest(program)), machine })
    }
}

/// Offsets in a 64-bit little-endian ELF file (System V ABI, *ELF Header* and *Program Header*).
mod elf {
    pub(super) const BEGINNING: &[u8] = b"\x7fELF\x02\x01\x01";
    pub(super) const MACHINE: usize = 18;
    pub(super) const SEGMENTS: usize = 32;
    pub(super) const SEGMENT_COUNT: usize = 56;
    pub(super) const SEGMENT_BYTES: usize = 56;
    /// `PT_INTERP`.
    pub(super) const INTERPRETER: u32 = 3;
}

fn machine(program: &[u8]) -> Option<&'static str> {
    let is_program = program.starts_with(elf::BEGINNING);
    let machine = program.get(elf::MACHINE..elf::MACHINE + 2).filter(|_| is_program)?;
    match machine {
        [62, 0] => Some("x86_64"),
        [183, 0] => Some("aarch64"),
        _ => None,
    }
}

/// Whether the program is started by another one, the dynamic linker. A table of segments that cannot be read counts as that.
fn names_an_interpreter(program: &[u8]) -> bool {
    let number = |at: usize, bytes: usize| {
        let bytes = program.get(at..at.checked_add(bytes)?)?;
        Some(bytes.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte)))
    };
    let segment = |index: u64| {
        let offset = number(elf::SEGMENTS, 8)?.checked_add(index * elf::SEGMENT_BYTES as u64)?;
        number(usize::try_from(offset).ok()?, 4)
    };
    let count = number(elf::SEGMENT_COUNT, 2).unwrap_or(0);
    count == 0 || (0..count).any(|index| segment(index).is_none_or(|kind| kind == u64::from(elf::INTERPRETER)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program of the given machine with one segment of this type.
    pub(super) fn program(machine: u8, segment: u8) -> Vec<u8> {
        let mut program = vec![0; 64 + elf::SEGMENT_BYTES];
        program[..elf::BEGINNING.len()].copy_from_slice(elf::BEGINNING);
        program[elf::MACHINE] = machine;
        program[elf::SEGMENTS] = 64;
        program[elf::SEGMENT_COUNT] = 1;
        program[64] = segment;
        program
    }

    #[test]
    fn only_static_programs_of_known_machines_are_first_programs() {
        assert_eq!(FirstProgram::new(&program(62, 1)).unwrap().machine, "x86_64");
        assert_eq!(FirstProgram::new(&program(183, 1)).unwrap().machine, "aarch64");
        assert!(matches!(FirstProgram::new(&program(62, 3)), Err(FirstProgramError::NotStatic)));
        let mut cut = program(62, 1);
        cut.truncate(64);
        assert!(matches!(FirstProgram::new(&cut), Err(FirstProgramError::NotStatic)));
        for other in [program(40, 1), b"#!/bin/sh\n".to_vec(), vec![], elf::BEGINNING.to_vec()] {
            assert!(matches!(FirstProgram::new(&other), Err(FirstProgramError::NotAProgram)));
        }
        // This test is linked dynamically.
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(matches!(FirstProgram::new(&own), Err(FirstProgramError::NotStatic)));
    }

    #[test]
    fn first_program_that_does_not_fit_into_a_script_is_refused() {
        let mut program = program(62, 1);
        // What does not compress.
        let noise = (0..u32::try_from(COMPRESSED_BYTES / 16).unwrap()).flat_map(|number| {
            let digest: [u8; 32] = Sha256::digest(number.to_le_bytes()).into();
            digest
        });
        program.extend(noise);
        assert!(matches!(FirstProgram::new(&program), Err(FirstProgramError::TooLarge(_))));
    }

    #[test]
    fn every_variable_that_is_missing_for_scripts_is_named() {
        let missing = AgentPackage::default().for_scripts().unwrap_err();
        assert_eq!(missing.len(), 4);
        assert!(missing.contains(&INSTALLER_PATH) && missing.contains(&names::PACKAGE_RELEASE_KEYS));
        let first_program = Some(FirstProgram::new(&program(62, 1)).unwrap());
        let package = AgentPackage { first_program, ..AgentPackage::default() };
        assert_eq!(package.for_scripts().unwrap_err().len(), 3);
    }
}
