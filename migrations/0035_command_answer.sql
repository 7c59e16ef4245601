-- migration: expand
-- The answer of a request with an Idempotency-Key, as it was first given: a JSON text with status, headers and body, or the refusal.
-- A row with an answer and no entity (its id is all zeros) belongs to a request that committed nothing: a refusal, or a request
-- that had nothing to change. The primary key decides between such a row and a commit under the same id: whichever is written first
-- excludes the other, so that a refusal never hides a transition.
-- The release before this one finds no reply in such a row and answers that the request was carried out before.
ALTER TABLE command ADD COLUMN answer text;
