-- The loss of rows that are not trained on, before the step; only where a run of SFT or DPO looked at it.
ALTER TABLE train_steps ADD COLUMN held_out_loss DOUBLE;
