//! The agent's package: an OCI artifact with a list of its files and a release signature, how it is made, pulled and installed.
//!
//! | module | what |
//! | --- | --- |
//! | [`contents`] | which programs and units are packaged, as a table |
//! | [`manifest`] | the artifact's documents: image manifest, list of files |
//! | [`signature`] | the Ed25519 release signature over the image manifest's digest |
//! | [`build`] | makes the artifact, reproducibly, as an OCI image layout |
//! | [`registry`] | the client of a registry: pulls by digest, pushes a layout |
//! | [`archive`] | the archive of files: written in a fixed order, unpacked against the list |
//! | [`install`] | puts a verified package in place on a node |
//! | [`update`] | the update of an installed agent: its record, and the finalizer |
//! | [`log_lines`] | the finalizer's log |
//! | [`source`] | where a node pulls from, according to its bootstrap bundle |

pub mod archive;
pub mod build;
pub mod contents;
pub mod install;
pub mod log_lines;
pub mod manifest;
pub mod registry;
pub mod signature;
pub mod source;
pub mod update;

pub use failures::chain;
