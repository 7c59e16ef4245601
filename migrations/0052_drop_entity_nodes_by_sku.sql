-- migration: expand
-- entity_by_sku has its place (0049). Of its own, since it locks out reads and writes for a moment: a build in the same transaction would
-- be begun anew with each attempt.
DROP INDEX IF EXISTS entity_nodes_by_sku;
