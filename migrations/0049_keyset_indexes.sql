-- migration: expand
-- Each filter of each list finds its page by an index that has the order of the list (deploy/decisions/0096). Those with a state end the
-- heap-only update of a transition that changes it; transitions within a state keep theirs. An index that was built beforehand stays.
-- One table in a migration: a transaction that waits for another table while commits wait for this one would not get through.
CREATE INDEX IF NOT EXISTS entity_by_state ON entity (kind, state, created_at, id);
CREATE INDEX IF NOT EXISTS entity_by_owner_and_state ON entity (kind, owner, state, created_at, id) WHERE owner IS NOT NULL;

-- Allocations as well as nodes: the one of nodes alone is not needed beside it (0052).
CREATE INDEX IF NOT EXISTS entity_by_sku ON entity (kind, sku, created_at, id) WHERE sku IS NOT NULL;
