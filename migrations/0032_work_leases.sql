-- migration: expand
-- Whose turn it is to do what nobody else may do meanwhile, by the database's clock: whoever dies loses the turn when its time is up.
CREATE TABLE turn (
    name  text PRIMARY KEY,
    until timestamptz NOT NULL
);

-- Up to when another's books were compared with ours.
CREATE TABLE compared (
    books text PRIMARY KEY,
    until timestamptz NOT NULL
);
