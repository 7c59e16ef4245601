-- migration: expand
-- What an account's ledger holds beside the windows that were charged (money that came in, adjustments, credits) is found without reading
-- those, of which there are thousands a month. Charging writes nothing to this index.
CREATE INDEX ledger_beside_usage ON ledger (account, number) WHERE kind <> 'usage';
