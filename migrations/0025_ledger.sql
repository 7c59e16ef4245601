-- migration: expand
-- The ledger (deploy/decisions/0025). A row is one posting: an amount that one named book gives and another gets, so that a
-- posting that does not sum to zero has no form here. Rows are written by the commit of the transition that decided them, and never changed.
CREATE TABLE ledger (
    account    uuid        NOT NULL,
    -- Each account's postings are numbered from 1 without a gap: one that is written twice, or missing, shows.
    number     bigint      NOT NULL CHECK (number > 0),
    -- The version of the account that it led to, as the history has it.
    version    bigint      NOT NULL,
    kind       text        NOT NULL,
    debit      text        NOT NULL,
    credit     text        NOT NULL,
    -- Millionths of a minor unit.
    amount     bigint      NOT NULL CHECK (amount > 0),
    currency   text        NOT NULL CHECK (currency ~ '^[A-Z]{3}$'),
    -- What is in `prepaid` of this account after it.
    balance    bigint      NOT NULL,
    allocation uuid,
    -- The while that is charged. Where something is given back it has no beginning.
    used_from  timestamptz,
    used_until timestamptz,
    -- What the account has paid for the allocation by then, in all.
    cost       bigint,
    reason     text,
    at         timestamptz NOT NULL,
    PRIMARY KEY (account, number),
    CONSTRAINT ledger_books CHECK (
        debit <> credit
        AND debit IN ('prepaid', 'revenue', 'processor_clearing', 'refunds', 'adjustments', 'write_off')
        AND credit IN ('prepaid', 'revenue', 'processor_clearing', 'refunds', 'adjustments', 'write_off')
    ),
    CONSTRAINT ledger_while CHECK (used_from < used_until)
);

-- No while of an allocation is charged twice. It leads to all postings of an allocation too.
CREATE UNIQUE INDEX ledger_window ON ledger (allocation, used_from);

CREATE FUNCTION ledger_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the ledger is append-only: a posting is mended by another posting';
END
$$;

CREATE TRIGGER ledger_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_is_append_only();

-- The same as entries of double entry: what each book has gained by each posting.
CREATE VIEW ledger_entry AS
    SELECT account, number, debit AS book, -amount AS amount, currency, allocation, at FROM ledger
    UNION ALL
    SELECT account, number, credit, amount, currency, allocation, at FROM ledger;
