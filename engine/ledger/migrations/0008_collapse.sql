-- The mean share of 3-grams that an answer has repeated, and the step's warning of a collapse, if any.

ALTER TABLE train_steps ADD COLUMN repeated DOUBLE;
ALTER TABLE train_steps ADD COLUMN collapse VARCHAR;
