-- migration: expand
-- What lists find entities by that changes in their life, as the labels of a node: the terms of each entity, written by its own commits. An
-- index on the snapshots would end the heap-only updates of all of them (0001), those that have no labels included. No entity that there
-- is has any yet.
CREATE TABLE term (
    entity uuid NOT NULL,
    term   text NOT NULL,
    PRIMARY KEY (entity, term)
);

CREATE INDEX term_entities ON term (term, entity);
