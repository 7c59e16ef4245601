-- migration: expand
-- Names that one entity at a time may have, beside its own unique name: those that change in its life, as the UUIDs of a node's GPUs.
-- The commit that claims a name inserts it, and the commit that gives it up deletes it.
CREATE TABLE claim (
    name   text PRIMARY KEY,
    entity uuid NOT NULL
);

-- What nodes in the inventory have now. Of two nodes with one UUID the older one has it; the other one finds out at its next commit, and
-- is quarantined. Each node's snapshot lists what it has, so that its removal gives that up; the release before ignores the list.
WITH reported AS (
    SELECT 'gpu/' || lower(gpu->>'uuid') AS name, gpu->>'uuid' AS uuid, id, created_at
    FROM entity
    CROSS JOIN LATERAL jsonb_array_elements(
        CASE WHEN jsonb_typeof(body->'inventory'->'gpus') = 'array' THEN body->'inventory'->'gpus' ELSE '[]' END
    ) AS gpu
    WHERE kind = 'node' AND state IN ('active', 'offline', 'draining', 'quarantined', 'retired')
),
first AS (
    SELECT DISTINCT ON (name) name, uuid, id FROM reported WHERE name IS NOT NULL ORDER BY name, created_at, id
),
claimed AS (
    INSERT INTO claim (name, entity) SELECT name, id FROM first
)
UPDATE entity
SET body = jsonb_set(body, '{claimed_gpus}', held.uuids)
FROM (SELECT id, jsonb_agg(uuid ORDER BY uuid) AS uuids FROM first GROUP BY id) AS held
WHERE entity.id = held.id;
