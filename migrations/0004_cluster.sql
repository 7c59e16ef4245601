-- migration: expand
-- Who owns which shard. The epoch is the fence: every commit names the one that it was decided under, every change of owner
-- raises it, and nothing lowers it.
CREATE TABLE shard (
    id    smallint PRIMARY KEY CHECK (id BETWEEN 0 AND 255),
    owner uuid,
    epoch bigint   NOT NULL DEFAULT 0
) WITH (fillfactor = 25);

INSERT INTO shard (id) SELECT generate_series(0, 255);

-- Running control-plane processes, and when they were last heard here, by the database's clock.
CREATE TABLE member (
    id         uuid        PRIMARY KEY,
    name       text        NOT NULL,
    started_at timestamptz NOT NULL,
    beat_at    timestamptz NOT NULL,
    details    jsonb       NOT NULL
) WITH (fillfactor = 50);

-- One row. A database that was restored from a backup begins a new incarnation, which lies in the upper bits of every epoch.
CREATE TABLE cluster (
    one         boolean PRIMARY KEY DEFAULT true CHECK (one),
    incarnation bigint  NOT NULL
);

INSERT INTO cluster (incarnation) VALUES (0);
