-- migration: expand
-- Allocations are found by their node, also after their end: those that there are get the term that each gets with its placement from this
-- release on. A commit waits for none of it.
INSERT INTO term (entity, term)
SELECT id, 'node/' || coalesce(body #>> '{phase,node_id}', body #>> '{phase,last,0}')
FROM entity
WHERE kind = 'allocation' AND coalesce(body #>> '{phase,node_id}', body #>> '{phase,last,0}') IS NOT NULL
ON CONFLICT DO NOTHING;

-- The fleet hour by hour (deploy/decisions/0106): what the console draws over time. An hour without a row, or without the one or the other
-- instant, was not measured, which is not zero.
CREATE TABLE fleet_hour (
    hour        timestamptz PRIMARY KEY,
    -- When the GPUs were counted, once in the hour; NULL where they were not.
    gpus_at     timestamptz,
    -- When its rentals and its revenue were added up, after its end; NULL until then.
    added_up_at timestamptz
);

CREATE TABLE fleet_hour_gpus (
    hour       timestamptz NOT NULL,
    sku        uuid        NOT NULL,
    region     text        NOT NULL,
    sku_name   text        NOT NULL,
    gpus_total bigint      NOT NULL,
    gpus_held  bigint      NOT NULL,
    gpus_free  bigint      NOT NULL,
    PRIMARY KEY (hour, sku, region)
);

-- Percentiles of parts do not add up to those of the whole, so each filter has rows of its own: the SKU of all SKUs is the zero UUID, the
-- region of all regions is empty.
CREATE TABLE fleet_hour_rentals (
    hour        timestamptz      NOT NULL,
    sku         uuid             NOT NULL,
    region      text             NOT NULL,
    begun       bigint           NOT NULL,
    p50_seconds double precision NOT NULL,
    p95_seconds double precision NOT NULL,
    PRIMARY KEY (hour, sku, region)
);

-- The sums of postings. Those without an allocation that is known have the zero UUID and an empty region.
CREATE TABLE fleet_hour_revenue (
    hour     timestamptz NOT NULL,
    currency text        NOT NULL,
    sku      uuid        NOT NULL,
    region   text        NOT NULL,
    -- Millionths of a minor unit; negative where more was given back than charged.
    amount   bigint      NOT NULL,
    PRIMARY KEY (hour, currency, sku, region)
);

-- The postings of an hour. Postings are appended nearly in the order of their time, so that an index of ranges is small and costs a commit
-- nothing. One that was built beforehand stays.
CREATE INDEX IF NOT EXISTS ledger_by_time ON ledger USING brin (at) WITH (pages_per_range = 32, autosummarize = on);
