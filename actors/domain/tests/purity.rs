//! The domain depends on plain data alone: nothing that runs, waits, looks at a clock or reaches out.

const MANIFEST: &str = include_str!("../Cargo.toml");

#[test]
fn the_domain_names_no_crate_of_the_outside_world_but_plain_data() {
    let dependencies: Vec<_> = MANIFEST
        .lines()
        .skip_while(|line| line.trim() != "[dependencies]")
        .skip(1)
        .take_while(|line| !line.trim_start().starts_with('['))
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .filter_map(|line| line.split(['.', '=', ' ']).next())
        .collect();
    assert_eq!(dependencies, ["serde", "serde_json", "thiserror", "uuid", "chrono"]);
    // Nor by another way in.
    let sections: Vec<_> = MANIFEST.lines().map(str::trim).filter(|line| line.starts_with('[')).collect();
    assert_eq!(sections, ["[package]", "[lints]", "[dependencies]", "[dev-dependencies]"]);
}
