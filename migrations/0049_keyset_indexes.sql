-- migration: expand
-- Each filter of each list finds its page by an index that has the order of the list (deploy/decisions/0096). Those with a state end the
-- heap-only update of a transition that changes it; transitions within a state keep theirs. An index that was built beforehand stays.
CREATE INDEX IF NOT EXISTS entity_by_state ON entity (kind, state, created_at, id);
CREATE INDEX IF NOT EXISTS entity_by_owner_and_state ON entity (kind, owner, state, created_at, id) WHERE owner IS NOT NULL;

-- Allocations as well as nodes: the one of nodes alone is not needed beside it.
CREATE INDEX IF NOT EXISTS entity_by_sku ON entity (kind, sku, created_at, id) WHERE sku IS NOT NULL;
DROP INDEX IF EXISTS entity_nodes_by_sku;

-- What is overdue, and what is due next, of all shards.
CREATE INDEX IF NOT EXISTS deadline_overdue ON deadline (deadline_at, entity) WHERE deadline_at IS NOT NULL;
