-- Metrics of a training step: rewards, loss, correction, lengths, time, memory. Shares lie in [0, 1],
-- `masked` is tokens by reason, `peak_memory` is bytes. Rows of older versions have none of it.

ALTER TABLE train_steps ADD COLUMN loss_fn VARCHAR;
ALTER TABLE train_steps ADD COLUMN reward_std DOUBLE;
ALTER TABLE train_steps ADD COLUMN zero_spread DOUBLE;
ALTER TABLE train_steps ADD COLUMN kl DOUBLE;
ALTER TABLE train_steps ADD COLUMN kl_old DOUBLE;
ALTER TABLE train_steps ADD COLUMN entropy DOUBLE;
ALTER TABLE train_steps ADD COLUMN ratio_min DOUBLE;
ALTER TABLE train_steps ADD COLUMN ratio_max DOUBLE;
ALTER TABLE train_steps ADD COLUMN clip_fraction DOUBLE;
ALTER TABLE train_steps ADD COLUMN masked JSON;
ALTER TABLE train_steps ADD COLUMN learned_tokens INTEGER;
ALTER TABLE train_steps ADD COLUMN length_mean DOUBLE;
ALTER TABLE train_steps ADD COLUMN length_max INTEGER;
ALTER TABLE train_steps ADD COLUMN truncated DOUBLE;
ALTER TABLE train_steps ADD COLUMN staleness DOUBLE;
ALTER TABLE train_steps ADD COLUMN tokens_per_s DOUBLE;
ALTER TABLE train_steps ADD COLUMN wait_s DOUBLE;
ALTER TABLE train_steps ADD COLUMN backpressure_s DOUBLE;
ALTER TABLE train_steps ADD COLUMN peak_memory BIGINT;
