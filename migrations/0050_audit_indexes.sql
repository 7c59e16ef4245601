-- migration: expand
-- The audit log is asked for one action, for one kind of targets, and for one request.
CREATE INDEX IF NOT EXISTS audit_by_action ON audit (action, at);
CREATE INDEX IF NOT EXISTS audit_by_target_kind ON audit (target_kind, at);
CREATE INDEX IF NOT EXISTS audit_by_correlation ON audit (correlation_id, at);
