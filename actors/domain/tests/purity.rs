//! The domain depends on crates of plain data and derives alone: no runtime, no clock, no input or output.

const MANIFEST: &str = include_str!("../Cargo.toml");

#[test]
fn domain_depends_on_plain_data_crates_only() {
    let dependencies: Vec<_> = MANIFEST
        .lines()
        .skip_while(|line| line.trim() != "[dependencies]")
        .skip(1)
        .take_while(|line| !line.trim_start().starts_with('['))
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .filter_map(|line| line.split(['.', '=', ' ']).next())
        .collect();
    assert_eq!(dependencies, ["serde", "serde_json", "strum", "thiserror", "uuid", "chrono"]);
    // Nor in another kind of dependency.
    let sections: Vec<_> = MANIFEST.lines().map(str::trim).filter(|line| line.starts_with('[')).collect();
    assert_eq!(sections, ["[package]", "[lints]", "[dependencies]", "[dev-dependencies]"]);
}
