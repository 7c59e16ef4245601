-- migration: expand
-- Business values by key, scope and the instant from which they hold. Nothing is overwritten: a later row wins.
CREATE TABLE policy_value (
    key          text        NOT NULL,
    scope_kind   text        NOT NULL CHECK (scope_kind IN ('global', 'user_id', 'project_id', 'org_id', 'plan')),
    scope_id     text        NOT NULL DEFAULT '',
    effective_at timestamptz NOT NULL,
    value        jsonb       NOT NULL,
    reason       text        NOT NULL,
    written_by   text        NOT NULL,
    written_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (key, scope_kind, scope_id, effective_at, written_at),
    CHECK ((scope_kind = 'global') = (scope_id = ''))
);

-- Keys of the control plane itself, sealed (AES-256-GCM under a key of the key ring); what may be known of them lies beside.
CREATE TABLE secret (
    name       text        PRIMARY KEY,
    key_id     text        NOT NULL,
    sealed     bytea       NOT NULL,
    public     jsonb       NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT now()
);
