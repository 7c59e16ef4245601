-- migration: expand
-- What binds a snapshot to the member that committed it: the version that it was made for (8 bytes), and HMAC-SHA256 over kind, id, version
-- and snapshot. Null, or of an older version: written by a release that does not seal.
ALTER TABLE entity ADD COLUMN seal bytea;

-- Envelope-encrypted private keys of imported rows (decisions 3, *SSH key*). No release writes or serves it.
ALTER TABLE entity ADD COLUMN ssh_private_key_enc bytea;

-- The stored request of an allocation under the specification's name; what it holds is sealed, and never served.
CREATE VIEW allocation_scheduling AS
SELECT id AS allocation_id,
       jsonb_build_object('scheduler_request_enc', body #> '{asked,scheduler_request_enc}') AS scheduler_metadata
FROM entity
WHERE kind = 'allocation';
