-- migration: expand
-- What happened to whom, in the order of commits: (shard, epoch, seq). Both logs are partitioned by time, so that old months
-- leave as whole tables; a default partition takes what no month was made for.
CREATE TABLE history (
    entity         uuid        NOT NULL,
    version        bigint      NOT NULL,
    kind           text        NOT NULL,
    shard          smallint    NOT NULL,
    epoch          bigint      NOT NULL,
    seq            bigint      NOT NULL,
    command        text        NOT NULL,
    command_id     uuid,
    from_state     text,
    to_state       text        NOT NULL,
    why            text        NOT NULL,
    actor          text        NOT NULL,
    correlation_id text        NOT NULL,
    at             timestamptz NOT NULL
) PARTITION BY RANGE (at);

CREATE INDEX history_by_entity ON history (entity, version);
CREATE TABLE history_default PARTITION OF history DEFAULT;

CREATE TABLE audit (
    shard          smallint    NOT NULL,
    epoch          bigint      NOT NULL,
    seq            bigint      NOT NULL,
    actor          text        NOT NULL,
    action         text        NOT NULL,
    target_kind    text        NOT NULL,
    target_id      uuid        NOT NULL,
    correlation_id text        NOT NULL,
    metadata       jsonb       NOT NULL,
    at             timestamptz NOT NULL
) PARTITION BY RANGE (at);

-- A unique index on a partitioned table must hold the partition key: that (shard, epoch, seq) alone does not repeat is what
-- the committer's counter is for.
CREATE UNIQUE INDEX audit_order ON audit (at, shard, epoch, seq);
CREATE TABLE audit_default PARTITION OF audit DEFAULT;

-- Makes the partitions of the running month (UTC) and of `ahead` more, where they are missing. A month whose rows already lie
-- in the default partition stays there. The table is filled aside and attached, which leaves writers of the parent alone.
CREATE FUNCTION make_partitions(ahead integer) RETURNS integer LANGUAGE plpgsql AS $$
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
                made := made + 1;
            EXCEPTION WHEN check_violation THEN
                RAISE NOTICE 'rows of % lie in the default partition: it is not split', name;
            END;
        END LOOP;
    END LOOP;
    RETURN made;
END
$$;
