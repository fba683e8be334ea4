-- Off-policy corrections of a step: tokens whose weight was capped, and the mean of all weights.

ALTER TABLE train_steps ADD COLUMN capped INTEGER;
ALTER TABLE train_steps ADD COLUMN correction_weight DOUBLE;
