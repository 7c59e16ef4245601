-- migration: contract
-- Policy values are entities, as everything else that is written: one per scope. Nothing but a hand ever wrote to this table, and
-- a release that still reads it goes on with the values it has.
DROP TABLE policy_value;
