-- Of the failures that `verifier_errors` counts, how many of each kind: what it raised, timeouts, no scores.

ALTER TABLE train_steps ADD COLUMN verifier_faults JSON;
