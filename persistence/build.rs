//! The embedded migrations: a new file alone would not be noticed.

fn main() {
    println!("cargo:rerun-if-changed=../migrations");
}
