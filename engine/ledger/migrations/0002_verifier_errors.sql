-- Failures of the policy's verifier itself in a step: it raised, hung, or returned no score.

ALTER TABLE train_steps ADD COLUMN verifier_errors INTEGER;
