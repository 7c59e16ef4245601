-- migration: expand
-- Domain events that are not yet settled. A row goes in the commit of its event's effect; where nothing follows from the
-- event, when the broker has acknowledged it. So what lies here is what still has to happen, whatever the broker forgot.
CREATE TABLE outbox (
    id             uuid        PRIMARY KEY,
    shard          smallint    NOT NULL,
    epoch          bigint      NOT NULL,
    seq            bigint      NOT NULL,
    subject        text        NOT NULL,
    event          jsonb       NOT NULL,
    correlation_id text        NOT NULL,
    traceparent    text,
    -- When it happened, by the clock of the member that decided it.
    created_at     timestamptz NOT NULL,
    -- When it was written, by the database's clock: ages are measured against this.
    written_at     timestamptz NOT NULL DEFAULT now()
);

CREATE UNIQUE INDEX outbox_order ON outbox (shard, epoch, seq);

-- Commands that were carried out, with a digest of the request and the reply, for a day.
CREATE TABLE command (
    id         uuid        PRIMARY KEY,
    entity     uuid        NOT NULL,
    shard      smallint    NOT NULL,
    digest     bytea       NOT NULL,
    reply      jsonb,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX command_by_age ON command (created_at);
