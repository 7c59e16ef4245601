-- migration: expand
-- Entities that failed too often and are left alone until an operator restarts them. An operational mark beside the state, and no
-- state: it says nothing of what an entity is, only that nobody is to wake it, so that whoever owns its shard next knows.
CREATE TABLE parked (
    entity    uuid        PRIMARY KEY,
    kind      text        NOT NULL,
    shard     smallint    NOT NULL,
    reason    text        NOT NULL,
    parked_at timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX parked_by_shard ON parked (shard);
