-- migration: expand
-- What is overdue, and what is due next, of all shards (deploy/decisions/0096).
CREATE INDEX IF NOT EXISTS deadline_overdue ON deadline (deadline_at, entity) WHERE deadline_at IS NOT NULL;
