//! The files of `migrations/`.

use sqlx::migrate::{Migration, MigrationType};

/// Version, name and text of each file, in their order (`build.rs`).
const EMBEDDED: &[(i64, &str, &str)] = &include!(concat!(env!("OUT_DIR"), "/migrations.rs"));

/// What a migration does to members that do not know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigrationKind {
    /// It adds. Members of the release before run on the schema after it.
    Expand,
    /// It removes, renames or narrows. Members that do not know it cannot run after it.
    Contract,
}

impl MigrationKind {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Expand => "expand",
            Self::Contract => "contract",
        }
    }
}

/// One file.
#[derive(Clone, Debug)]
pub struct SchemaMigration {
    pub version: i64,
    pub name: String,
    pub kind: MigrationKind,
    pub(super) sql: &'static str,
    pub(super) checksum: Vec<u8>,
}

impl SchemaMigration {
    /// A migration with the text of its file. One without a mark counts as a contract.
    #[must_use]
    pub fn new(version: i64, name: &str, text: &'static str) -> Self {
        let (kind, sql) = marked(text).unwrap_or((MigrationKind::Contract, text));
        // Over what follows the mark: files from before the marks have the checksum that they were applied with.
        let hashed = Migration::new(
            version,
            name.to_owned().into(),
            MigrationType::Simple,
            sqlx::SqlSafeStr::into_sql_str(sql),
            false,
        );
        Self { version, name: name.to_owned(), kind, sql, checksum: hashed.checksum.into_owned() }
    }
}

/// The mark of a file, and what follows it.
fn marked(text: &'static str) -> Option<(MigrationKind, &'static str)> {
    let (mark, sql) = text.split_once('\n')?;
    let kinds = [MigrationKind::Expand, MigrationKind::Contract];
    let kind = kinds.into_iter().find(|kind| mark.strip_prefix("-- migration: ") == Some(kind.name()))?;
    Some((kind, sql))
}

/// The migrations that a release knows, in their order.
#[derive(Clone, Debug)]
pub struct Migrations(Vec<SchemaMigration>);

impl Migrations {
    /// Those of this release.
    #[must_use]
    pub fn embedded() -> Self {
        Self(EMBEDDED.iter().map(|(version, name, text)| SchemaMigration::new(*version, name, text)).collect())
    }

    /// Those of a release that ends with `version`.
    #[must_use]
    pub fn up_to(mut self, version: i64) -> Self {
        self.0.retain(|migration| migration.version <= version);
        self
    }

    /// Those of a release with one migration more.
    #[must_use]
    pub fn and(mut self, migration: SchemaMigration) -> Self {
        self.0.push(migration);
        self.0.sort_by_key(|migration| migration.version);
        self
    }

    /// The last one; 0 where there is none.
    #[must_use]
    pub fn known(&self) -> i64 {
        self.0.last().map_or(0, |migration| migration.version)
    }

    pub fn iter(&self) -> impl Iterator<Item = &SchemaMigration> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words after which a member of the release before may fail, or find less than it wrote.
    const REMOVALS: [&str; 6] = ["drop table", "drop column", "drop view", "drop sequence", "rename", "set not null"];

    fn removes(sql: &str) -> Vec<&'static str> {
        let code: Vec<&str> = sql.lines().map(|line| line.split("--").next().unwrap_or_default()).collect();
        let code = code.join(" ").to_lowercase();
        let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut found: Vec<_> = REMOVALS.into_iter().filter(|word| one_line(&code).contains(word)).collect();
        for statement in one_line(&code).split(';') {
            let alters = statement.contains("alter column") && statement.contains(" type ");
            found.extend(alters.then_some("alter column … type"));
            for column in statement.split("add column").skip(1) {
                let column = column.split(',').next().unwrap_or_default();
                let strict = column.contains("not null") && !column.contains("default");
                found.extend(strict.then_some("add column … not null without a default"));
            }
        }
        found
    }

    #[test]
    fn every_migration_has_the_mark_that_its_statements_call_for() {
        for (version, _, text) in EMBEDDED {
            let (kind, sql) = marked(text).unwrap_or_else(|| {
                panic!("migration {version:04} begins with neither `-- migration: expand` nor `-- migration: contract`")
            });
            let removed = removes(sql);
            match kind {
                MigrationKind::Expand => assert!(
                    removed.is_empty(),
                    "migration {version:04} is marked expand, and the release before does not run after {removed:?}"
                ),
                MigrationKind::Contract => {
                    assert!(!removed.is_empty(), "migration {version:04} is marked contract, and removes nothing");
                }
            }
        }
    }

    #[test]
    fn statement_that_removes_is_found() {
        for sql in [
            "DROP TABLE a;",
            "ALTER TABLE a DROP COLUMN b;",
            "ALTER TABLE a\n    RENAME b TO c;",
            "ALTER TABLE a ALTER COLUMN b TYPE bigint;",
            "ALTER TABLE a ALTER COLUMN b SET  NOT NULL;",
            "ALTER TABLE a ADD COLUMN b text NOT NULL;",
        ] {
            assert_eq!(removes(sql).len(), 1, "{sql}");
        }
        for sql in [
            "-- DROP TABLE a: in the release after the next\nCREATE TABLE b (type text NOT NULL);",
            "ALTER TABLE a ADD COLUMN b bigint NOT NULL DEFAULT nextval('c'), ADD COLUMN d bigint;",
        ] {
            assert!(removes(sql).is_empty(), "{sql}");
        }
    }

    #[test]
    fn mark_leaves_the_checksum_of_what_follows_it() {
        let plain = SchemaMigration::new(1, "one", "CREATE TABLE a ();\n");
        let marked = SchemaMigration::new(1, "one", "-- migration: expand\nCREATE TABLE a ();\n");
        assert_eq!(plain.checksum, marked.checksum);
        assert_eq!(
            (plain.kind, marked.kind),
            (MigrationKind::Contract, MigrationKind::Expand),
            "the careful one without a mark"
        );
    }

    #[test]
    fn checksums_of_released_migrations_are_those_of_databases_in_use() {
        // SHA-384 of 0001 and 0041 as releases without marks computed it.
        let embedded = Migrations::embedded();
        for (version, checksum) in [(1, FIRST), (41, LAST_WITHOUT_MARK)] {
            let found = embedded.iter().find(|it| it.version == version).map(|it| hex::encode(&it.checksum));
            assert_eq!(found.as_deref(), Some(checksum));
        }
    }

    const FIRST: &str =
        "f1ffe74d0bc49ce64b961c68846a2a24c4d91f64d54ebfaeddb9508b9b3074ab6bf81359d0bdaf388c40b7d109e8d165";
    const LAST_WITHOUT_MARK: &str =
        "226049408d5215d7746099df1a8c4ffcfe0ebdd16599015b69396c6fb39bf9c550b8d50db6a94db0ea8d495ccdc85ce9";
}
