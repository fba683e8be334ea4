-- What off-policy corrections did to a step: tokens whose weight they cut, and the mean of all weights.

ALTER TABLE train_steps ADD COLUMN capped INTEGER;
ALTER TABLE train_steps ADD COLUMN correction_weight DOUBLE;
