-- The failures that `verifier_errors` counts, by kind: exceptions, timeouts, missing scores.

ALTER TABLE train_steps ADD COLUMN verifier_faults JSON;
