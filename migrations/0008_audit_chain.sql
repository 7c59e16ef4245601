-- migration: expand
-- The audit log cannot be rewritten unseen. Its rows are sealed, a moment after their commit, into one hash chain per shard;
-- signed heads are kept apart from rows and seals (deploy/decisions/0008-the-audit-chain.md says who can hide what).
ALTER TABLE audit ADD CONSTRAINT audit_shard CHECK (shard BETWEEN 0 AND 255);

-- The sealer's way: what follows a place in a shard.
CREATE INDEX audit_by_shard ON audit (shard, epoch, seq);

-- One row of the chain: `hash` is made of the hash before it, the number and every column of the audit row at that place.
CREATE TABLE audit_seal (
    shard  smallint NOT NULL,
    number bigint   NOT NULL CHECK (number > 0),
    epoch  bigint   NOT NULL,
    seq    bigint   NOT NULL,
    hash   bytea    NOT NULL CHECK (length(hash) = 32),
    PRIMARY KEY (shard, number)
);

CREATE UNIQUE INDEX audit_seal_place ON audit_seal (shard, epoch, seq);

-- What the chain of a shard had come to, signed by the control plane's audit key: one for each time that something was sealed.
CREATE TABLE audit_head (
    shard     smallint    NOT NULL,
    number    bigint      NOT NULL,
    epoch     bigint      NOT NULL,
    seq       bigint      NOT NULL,
    hash      bytea       NOT NULL CHECK (length(hash) = 32),
    sealed_at timestamptz NOT NULL,
    key_id    text        NOT NULL,
    signature bytea       NOT NULL,
    PRIMARY KEY (shard, number)
);

-- Where the chain of a shard begins after old months were dropped: the hash to go on from, and the digests of those rows up to
-- there that stand in a month that was kept. Signed like a head.
CREATE TABLE audit_checkpoint (
    shard     smallint    NOT NULL,
    number    bigint      NOT NULL,
    epoch     bigint      NOT NULL,
    seq       bigint      NOT NULL,
    hash      bytea       NOT NULL CHECK (length(hash) = 32),
    dropped   timestamptz NOT NULL,
    kept      jsonb       NOT NULL,
    signed_at timestamptz NOT NULL,
    key_id    text        NOT NULL,
    signature bytea       NOT NULL,
    PRIMARY KEY (shard, number)
);

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rows of % are never changed or deleted', TG_TABLE_NAME
        USING ERRCODE = 'insufficient_privilege', HINT = 'Old months leave as whole partitions: gpuaas audit forget.';
END
$$;

CREATE TRIGGER audit_stays BEFORE UPDATE OR DELETE ON audit FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER audit_seal_stays BEFORE UPDATE ON audit_seal FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER audit_head_stays BEFORE UPDATE ON audit_head FOR EACH ROW EXECUTE FUNCTION refuse_change();

-- A table is emptied past its row triggers, and a parent's trigger does not guard its partitions.
CREATE FUNCTION guard_partition(name text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format(
        'CREATE OR REPLACE TRIGGER audit_is_not_emptied BEFORE TRUNCATE ON %I EXECUTE FUNCTION refuse_change()', name
    );
END
$$;

SELECT guard_partition(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'audit'::regclass;
SELECT guard_partition('audit');

-- As before, and what is made for the audit log is guarded.
CREATE OR REPLACE FUNCTION make_partitions(ahead integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    parent text;
    first  timestamp;
    name   text;
    made   integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(7311704871501);
    FOREACH parent IN ARRAY ARRAY['history', 'audit'] LOOP
        FOR step IN 0..ahead LOOP
            first := date_trunc('month', now() AT TIME ZONE 'UTC') + make_interval(months => step);
            name := format('%s_%s', parent, to_char(first, 'YYYY_MM'));
            CONTINUE WHEN to_regclass(name) IS NOT NULL;
            BEGIN
                EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL)', name, parent);
                EXECUTE format(
                    'ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                    parent, name,
                    first AT TIME ZONE 'UTC', (first + interval '1 month') AT TIME ZONE 'UTC'
                );
                IF parent = 'audit' THEN
                    PERFORM guard_partition(name);
                END IF;
                made := made + 1;
            EXCEPTION WHEN check_violation THEN
                RAISE NOTICE 'rows of % lie in the default partition: it is not split', name;
            END;
        END LOOP;
    END LOOP;
    RETURN made;
END
$$;
