-- migration: expand
-- Every thing that is written is an entity: one row with its last snapshot, and, where it waits for something, one row in
-- the deadline index. Pages keep room (fillfactor) and nothing that changes is indexed, so that an update stays heap-only.
CREATE TABLE entity (
    id          uuid        PRIMARY KEY,
    kind        text        NOT NULL,
    shard       smallint    NOT NULL CHECK (shard BETWEEN 0 AND 255),
    version     bigint      NOT NULL CHECK (version > 0),
    state       text        NOT NULL,
    body        jsonb       NOT NULL,
    owner       text,
    sku         uuid,
    unique_name text,
    created_at  timestamptz NOT NULL,
    updated_at  timestamptz NOT NULL
) WITH (fillfactor = 75);

CREATE UNIQUE INDEX entity_unique_name ON entity (kind, unique_name) WHERE unique_name IS NOT NULL;
CREATE INDEX entity_by_kind ON entity (kind, created_at, id);
CREATE INDEX entity_by_owner ON entity (kind, owner, created_at, id) WHERE owner IS NOT NULL;
CREATE INDEX entity_nodes_by_sku ON entity (sku) WHERE kind = 'node';

-- When an entity wants its next tick, and the end that its state must not outlive unseen. A shard's owner reads what is due,
-- so that a deadline fires without its actor having been awake.
CREATE TABLE deadline (
    entity      uuid        PRIMARY KEY,
    kind        text        NOT NULL,
    shard       smallint    NOT NULL,
    wake_at     timestamptz NOT NULL,
    deadline_at timestamptz,
    reason      text        NOT NULL
) WITH (fillfactor = 75);

CREATE INDEX deadline_due ON deadline (shard, wake_at);
