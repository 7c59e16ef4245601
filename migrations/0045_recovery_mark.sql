-- migration: expand
-- How far the commits of this database have come. Members raise the mark every second and publish it on the bus, so that a database that was
-- restored from a backup is behind what the bus knows. Identity and timeline are those of the server that committed the last raise.
CREATE TABLE recovery_mark (
    one               boolean     PRIMARY KEY DEFAULT true CHECK (one),
    cluster_id        uuid        NOT NULL DEFAULT gen_random_uuid(),
    mark              bigint      NOT NULL DEFAULT 0,
    system_identifier bigint,
    timeline          bigint,
    raised_at         timestamptz
) WITH (fillfactor = 25);

INSERT INTO recovery_mark DEFAULT VALUES;

-- The backups that the repository had when the last one ended, as `gpuaas-backup` has read them there.
CREATE TABLE backup_record (
    label        text        PRIMARY KEY,
    kind         text        NOT NULL,
    completed_at timestamptz NOT NULL,
    wal_stop     text        NOT NULL,
    recorded_at  timestamptz NOT NULL DEFAULT now()
);
