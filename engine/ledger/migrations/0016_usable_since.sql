-- The oldest version whose code may use the ledger: what came since has only added tables, columns and views, which that
-- code leaves alone. A migration that does more sets it to its own number.
ALTER TABLE migrations ADD COLUMN usable_since INTEGER DEFAULT 16;
