-- migration: expand
-- How large the tables were, once a day: what `gpuaas retention` computes growth from. The name of the whole database is empty.
CREATE TABLE table_size (
    name        text        NOT NULL,
    measured_at timestamptz NOT NULL,
    bytes       bigint      NOT NULL,
    PRIMARY KEY (name, measured_at)
);
