-- migration: expand
-- How many entities there are of each kind in each state, as changes that add up: a commit only appends, so that no commit waits for
-- another, and a sweep adds up. What the release before commits beside this one is not in it; each member counts anew when it starts.
CREATE TABLE entity_count (
    kind   text   NOT NULL,
    state  text   NOT NULL,
    change bigint NOT NULL
);

INSERT INTO entity_count (kind, state, change) SELECT kind, state, count(*) FROM entity GROUP BY kind, state;

-- The audit log is asked for what one actor did, and for what was done to one target, newest first.
CREATE INDEX audit_by_actor ON audit (actor, at);
CREATE INDEX audit_by_target ON audit (target_id, at);
