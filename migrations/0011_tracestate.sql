-- migration: expand
-- The second half of a trace's context (W3C Trace Context): what the parties before us keep in it, passed on with the event.
ALTER TABLE outbox ADD COLUMN tracestate text;
