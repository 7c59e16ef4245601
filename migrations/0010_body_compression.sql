-- migration: expand
-- Snapshots of nodes are longer than what is stored as it is (2 kB), and each of their transitions writes one anew: the default
-- compression (pglz) was the dearest single function in the server. Where the server was built without lz4, it stays as it is.
DO $$
BEGIN
    ALTER TABLE entity ALTER COLUMN body SET COMPRESSION lz4;
EXCEPTION WHEN feature_not_supported THEN
    RAISE NOTICE 'this server has no lz4: snapshots stay compressed by pglz';
END
$$;
