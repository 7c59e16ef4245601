-- migration: expand
-- What a posting goes back to (deploy/decisions/0026): a payment, a refund, or what was done at the payment processor. The release before
-- writes neither column.
ALTER TABLE ledger ADD COLUMN payment uuid, ADD COLUMN reference text;

-- One deposit for a payment, one refund under its id, one reversal under the processor's: the last word against moving money twice.
CREATE UNIQUE INDEX ledger_reference ON ledger (reference, kind) WHERE reference IS NOT NULL;
