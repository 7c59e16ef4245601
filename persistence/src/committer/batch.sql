-- One batch of transitions, all or nothing of each. Every branch hangs on `fencing_check`, the locked shards whose owner and epoch
-- still are what the batch was decided under; what is written beside the snapshot hangs on `passed`.
--
-- The planner is given no choice here (see `session` in lane.rs): joins of what the batch brought are hash joins, tables are
-- reached by index through `= ANY(array)`. That is why the arrays appear beside the joins which already say the same.
WITH item AS MATERIALIZED (
    SELECT *
    FROM unnest(
        $3::uuid[], $4::text[], $5::smallint[], $6::bigint[], $7::bigint[], $8::bigint[], $9::text[], $10::text[],
        $11::text[], $12::text[], $13::uuid[], $14::text[], $15::timestamptz[], $16::timestamptz[], $17::text[],
        $18::timestamptz[], $19::text[], $20::uuid[], $21::bytea[], $22::text[], $23::uuid[], $24::text[], $25::text[],
        $26::text[], $27::text[], $40::text[], $63::bytea[], $69::text[]
    ) WITH ORDINALITY AS item (
        id, kind, shard, epoch, seq, expected, body, from_state,
        to_state, owner, sku, unique_name, wake_at, deadline_at, reason,
        at, command, command_id, digest, reply, consumes, why, actor,
        correlation_id, traceparent, tracestate, seal, resolved, ord
    )
),
-- Fencing: a transition of a shard that another member owns by now, or of an older epoch, is not written (`Fenced`).
fencing_check AS MATERIALIZED (
    SELECT id, epoch FROM shard WHERE id = ANY ($2::smallint[]) AND owner = $1 ORDER BY id FOR SHARE
),
done AS MATERIALIZED (
    SELECT id, entity, digest, reply FROM command WHERE id = ANY ($20)
),
-- What transitions rest on beside their own entity. The lock keeps it as it is until this batch is committed; one that came
-- later has changed it before, and is seen here. Transitions whose precondition does not hold any more are `void`.
precondition AS MATERIALIZED (
    SELECT id, version FROM entity WHERE id = ANY ($42::uuid[]) ORDER BY id FOR SHARE
),
void AS MATERIALIZED (
    SELECT required.ord
    FROM unnest($41::bigint[], $42::uuid[], $43::bigint[]) AS required (ord, id, version)
    LEFT JOIN precondition ON precondition.id = required.id AND precondition.version = required.version
    WHERE precondition.id IS NULL
),
-- Names that transitions claim and an entity has. One that is claimed in between violates the table's key, and the batch is sent again.
claimed AS MATERIALIZED (
    SELECT wants.ord, claim.name, claim.entity
    FROM unnest($59::bigint[], $60::text[]) AS wants (ord, name)
    JOIN claim ON claim.name = ANY ($60) AND claim.name = wants.name
),
foreign_claim AS MATERIALIZED (
    SELECT claimed.ord, array_agg(claimed.name) AS names, array_agg(claimed.entity) AS holders
    FROM claimed
    JOIN item ON item.ord = claimed.ord
    WHERE claimed.entity <> item.id
    GROUP BY claimed.ord
),
ready AS MATERIALIZED (
    SELECT item.*
    FROM item
    JOIN fencing_check ON fencing_check.id = item.shard AND fencing_check.epoch = item.epoch
    LEFT JOIN done ON done.id = item.command_id
    WHERE done.id IS NULL AND NOT EXISTS (SELECT FROM void WHERE void.ord = item.ord)
      AND NOT EXISTS (SELECT FROM foreign_claim WHERE foreign_claim.ord = item.ord)
),
updated AS (
    UPDATE entity
    SET version = entity.version + 1, state = ready.to_state, body = ready.body::jsonb, seal = ready.seal, updated_at = ready.at
    FROM ready
    WHERE entity.id = ANY ($3) AND entity.id = ready.id AND entity.version = ready.expected
      AND entity.kind = ready.kind AND entity.shard = ready.shard
    RETURNING entity.id
),
created AS (
    INSERT INTO entity (id, kind, shard, version, state, body, seal, owner, sku, unique_name, created_at, updated_at)
    SELECT id, kind, shard, 1, to_state, body::jsonb, seal, owner, sku, unique_name, at, at FROM ready WHERE expected = 0
    ON CONFLICT (id) DO NOTHING
    RETURNING id
),
passed AS MATERIALIZED (
    SELECT id, kind, shard, epoch, seq, expected, from_state, to_state, wake_at, deadline_at, reason, at, command, command_id,
           digest, reply, resolved, consumes, why, actor, correlation_id, traceparent, tracestate, ord
    FROM ready WHERE ready.id IN (SELECT id FROM updated UNION ALL SELECT id FROM created)
),
claim_row AS (
    INSERT INTO claim (name, entity)
    SELECT wants.name, passed.id
    FROM unnest($59::bigint[], $60::text[]) AS wants (ord, name)
    JOIN passed ON passed.ord = wants.ord
    LEFT JOIN claimed ON claimed.ord = wants.ord AND claimed.name = wants.name
    WHERE claimed.name IS NULL
),
dropped_claim AS (
    DELETE FROM claim USING passed, unnest($61::bigint[], $62::text[]) AS drops (ord, name)
    WHERE claim.name = ANY ($62) AND claim.name = drops.name AND claim.entity = passed.id AND passed.ord = drops.ord
),
term_row AS (
    INSERT INTO term (entity, term)
    SELECT passed.id, adds.term
    FROM unnest($64::bigint[], $65::text[]) AS adds (ord, term)
    JOIN passed ON passed.ord = adds.ord
    ON CONFLICT (entity, term) DO NOTHING
),
dropped_term AS (
    DELETE FROM term USING passed, unnest($66::bigint[], $67::text[], $68::uuid[]) AS drops (ord, term, entity)
    WHERE term.entity = ANY ($68) AND term.entity = drops.entity AND term.term = drops.term
      AND passed.ord = drops.ord AND passed.id = drops.entity
),
history_row AS (
    INSERT INTO history (entity, version, kind, shard, epoch, seq, command, command_id, from_state, to_state, why, actor,
                         correlation_id, at)
    SELECT id, expected + 1, kind, shard, epoch, seq, command, command_id, from_state, to_state, why, actor,
           correlation_id, at
    FROM passed
),
counted AS (
    INSERT INTO entity_count (kind, state, change)
    SELECT kind, state, sum(change)
    FROM (
        SELECT kind, to_state AS state, 1 AS change FROM passed WHERE from_state IS DISTINCT FROM to_state
        UNION ALL
        SELECT kind, from_state, -1 FROM passed WHERE from_state <> to_state
    ) AS moved
    GROUP BY kind, state HAVING sum(change) <> 0
),
summed AS (
    INSERT INTO entity_sum (shard, kind, sku, sku_name, region, gpus_free, currency, state, entities, gpus_total, gpus_sold,
                            gpus_held, balance)
    SELECT passed.shard, passed.kind, adds.sku, adds.sku_name, adds.region, adds.gpus_free, adds.currency, adds.state,
           adds.entities, adds.gpus_total, adds.gpus_sold, adds.gpus_held, adds.balance
    FROM unnest($70::bigint[], $71::uuid[], $72::text[], $73::text[], $74::integer[], $75::text[], $76::text[], $77::bigint[],
                $78::bigint[], $79::bigint[], $80::bigint[], $81::bigint[])
         AS adds (ord, sku, sku_name, region, gpus_free, currency, state, entities, gpus_total, gpus_sold, gpus_held, balance)
    JOIN passed ON passed.ord = adds.ord
),
audit_row AS (
    INSERT INTO audit (shard, epoch, seq, actor, action, target_kind, target_id, correlation_id, metadata, at)
    SELECT passed.shard, passed.epoch, recorded.seq, passed.actor, recorded.action, recorded.target_kind, recorded.target_id,
           passed.correlation_id, recorded.metadata::jsonb, passed.at
    FROM unnest($28::bigint[], $29::bigint[], $30::text[], $31::text[], $32::uuid[], $33::text[])
         AS recorded (ord, seq, action, target_kind, target_id, metadata)
    JOIN passed ON passed.ord = recorded.ord
),
outbox_row AS (
    INSERT INTO outbox (id, shard, epoch, seq, subject, event, correlation_id, traceparent, tracestate, created_at)
    SELECT published.id, passed.shard, passed.epoch, published.seq, published.subject, published.event::jsonb, passed.correlation_id,
           passed.traceparent, passed.tracestate, passed.at
    FROM unnest($34::bigint[], $35::uuid[], $36::bigint[], $37::text[], $38::text[])
         AS published (ord, id, seq, subject, event)
    JOIN passed ON passed.ord = published.ord
),
ledger_row AS (
    INSERT INTO ledger (account, number, version, kind, debit, credit, amount, currency, balance, allocation, used_from,
                        used_until, cost, reason, payment, reference, at)
    SELECT passed.id, posted.number, passed.expected + 1, posted.kind, posted.debit, posted.credit, posted.amount,
           posted.currency, posted.balance, posted.allocation, posted.used_from, posted.used_until, posted.cost,
           posted.reason, posted.payment, posted.reference, passed.at
    FROM unnest($44::bigint[], $45::bigint[], $46::text[], $47::text[], $48::text[], $49::bigint[], $50::text[],
                $51::bigint[], $52::uuid[], $53::timestamptz[], $54::timestamptz[], $55::bigint[], $56::text[],
                $57::uuid[], $58::text[])
         AS posted (ord, number, kind, debit, credit, amount, currency, balance, allocation, used_from, used_until, cost,
                    reason, payment, reference)
    JOIN passed ON passed.ord = posted.ord
),
settled AS (
    DELETE FROM outbox USING passed WHERE outbox.id = ANY ($23) AND outbox.id = passed.consumes
),
command_row AS (
    INSERT INTO command (id, entity, shard, digest, reply, resolved)
    SELECT command_id, id, shard, digest, reply::jsonb, resolved FROM passed WHERE command_id IS NOT NULL
),
deadline_row AS (
    INSERT INTO deadline (entity, kind, shard, wake_at, deadline_at, reason)
    SELECT id, kind, shard, wake_at, deadline_at, reason FROM passed WHERE wake_at IS NOT NULL
    ON CONFLICT (entity) DO UPDATE
    SET wake_at = excluded.wake_at, deadline_at = excluded.deadline_at, reason = excluded.reason
    WHERE (deadline.wake_at, deadline.deadline_at, deadline.reason)
          IS DISTINCT FROM (excluded.wake_at, excluded.deadline_at, excluded.reason)
),
dropped_deadline AS (
    DELETE FROM deadline USING passed
    WHERE deadline.entity = ANY ($39::uuid[]) AND deadline.entity = passed.id AND passed.wake_at IS NULL
)
-- One row with the places of all that passed, and one for each that did not.
SELECT array_agg(ord) AS applied, NULL::bigint AS ord, NULL::boolean AS owned, NULL::uuid AS entity, NULL::bytea AS digest,
       NULL::text AS reply, NULL::text[] AS names, NULL::uuid[] AS holders
FROM passed
UNION ALL
SELECT NULL, item.ord, fencing_check.id IS NOT NULL, done.entity, done.digest, done.reply::text,
       foreign_claim.names, foreign_claim.holders
FROM item
LEFT JOIN fencing_check ON fencing_check.id = item.shard AND fencing_check.epoch = item.epoch
LEFT JOIN done ON done.id = item.command_id
LEFT JOIN foreign_claim ON foreign_claim.ord = item.ord
LEFT JOIN passed ON passed.ord = item.ord
WHERE passed.ord IS NULL
