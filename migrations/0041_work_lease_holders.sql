-- migration: expand
-- Who holds a lease, and under which number. A number is given once and never again, so that a holder whose lease has lapsed cannot release
-- or mistake for its own what another has acquired since. Rows of the release before have no holder; they lapse by `until`, as they did.
CREATE SEQUENCE lease_epoch AS bigint;
ALTER TABLE turn ADD COLUMN holder uuid,
                 ADD COLUMN epoch  bigint NOT NULL DEFAULT nextval('lease_epoch'),
                 ADD COLUMN lasts_ms bigint;
