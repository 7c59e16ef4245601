//! Makes the table of the embedded migrations: version, name and text of each file, `0045_recovery_mark.sql` being the 45th, *recovery mark*. The macro
//! of sqlx does the same, and has cargo compile the driver of Postgres a second time for the macro itself.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

const FOLDER: &str = "../migrations";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A new file alone would not be noticed.
    println!("cargo::rerun-if-changed={FOLDER}");
    let mut files = Vec::new();
    for entry in fs::read_dir(FOLDER)? {
        let file = entry?.file_name().into_string().map_err(|name| format!("{} is not UTF-8", name.display()))?;
        if let Some(stem) = file.strip_suffix(".sql") {
            let (version, name) =
                stem.split_once('_').ok_or_else(|| format!("{file} is not named VERSION_NAME.sql"))?;
            files.push((version.parse::<i64>()?, name.replace('_', " "), file));
        }
    }
    files.sort();
    let mut table = "[\n".to_owned();
    for (version, name, file) in files {
        let path = format!("/{FOLDER}/{file}");
        writeln!(table, "({version}, {name:?}, include_str!(concat!(env!(\"CARGO_MANIFEST_DIR\"), {path:?}))),")?;
    }
    table.push(']');
    fs::write(Path::new(&env::var("OUT_DIR")?).join("migrations.rs"), table)?;
    Ok(())
}
