-- migration: expand
-- What terminals showed: bulk, not state. A session's machine says who may have it; here it lies, in the order in which it came.

CREATE TABLE recording (
    session_id    uuid PRIMARY KEY,
    owner         text NOT NULL,
    allocation_id uuid NOT NULL,
    node_id       uuid NOT NULL,
    -- The key of its own, under which all its chunks are sealed, and the key of the key ring that seals this one.
    key_id        text NOT NULL,
    key_enc       bytea NOT NULL,
    -- How many chunks there are, and how long they are together.
    chunks        integer NOT NULL DEFAULT 0,
    bytes         bigint NOT NULL DEFAULT 0,
    -- Output that the agent could not record.
    lost_bytes    bigint NOT NULL DEFAULT 0,
    -- The time of the last frame, since the session's beginning.
    micros        bigint NOT NULL DEFAULT 0,
    -- No chunk follows.
    ended         boolean NOT NULL DEFAULT false,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX recording_of_owner ON recording (owner, created_at, session_id) INCLUDE (bytes);
CREATE INDEX recording_of_allocation ON recording (allocation_id, created_at, session_id);
CREATE INDEX recording_in_order ON recording (created_at, session_id) INCLUDE (bytes);

CREATE TABLE recording_chunk (
    session_id uuid NOT NULL REFERENCES recording ON DELETE CASCADE,
    seq        integer NOT NULL,
    frames_enc bytea NOT NULL,
    PRIMARY KEY (session_id, seq)
);

-- What is sealed does not get smaller.
ALTER TABLE recording_chunk ALTER COLUMN frames_enc SET STORAGE EXTERNAL;
