-- migration: expand
-- What nodes and billing accounts add up to, as changes: a commit only appends, so that no commit waits for another, and a sweep adds up
-- (deploy/decisions/0104). By shard, since each process exports what its shards have, and since a shard is counted by its owner.
CREATE TABLE entity_sum (
    shard      smallint NOT NULL,
    kind       text     NOT NULL,
    -- Of nodes, with the free GPUs of each of them.
    sku        uuid,
    sku_name   text,
    region     text,
    gpus_free  integer,
    -- Of accounts.
    currency   text,
    state      text,
    entities   bigint   NOT NULL,
    gpus_total bigint   NOT NULL,
    gpus_sold  bigint   NOT NULL,
    gpus_held  bigint   NOT NULL,
    balance    bigint   NOT NULL
);

-- Shards whose entities were counted since this release is there: the sums of the others lack what was committed before.
CREATE TABLE counted_shard (
    shard smallint PRIMARY KEY
);

-- Nothing is to be counted in a new installation.
INSERT INTO counted_shard (shard)
SELECT id FROM shard WHERE NOT EXISTS (SELECT FROM entity WHERE kind IN ('node', 'billing_account'));
