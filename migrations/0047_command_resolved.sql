-- migration: expand
-- What the answer to a request with an Idempotency-Key shows beside the machine's reply, as it was read before the command: a JSON text.
-- With it the answer follows from the row that the commit writes, and nothing is written after the commit. Null where the reply suffices,
-- and in rows of the release before this one, which stores the answer itself by an update.
ALTER TABLE command ADD COLUMN resolved text;
