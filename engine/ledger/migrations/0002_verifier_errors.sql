-- How often a policy's verifier itself failed in a step: it raised, hung, or returned no score.

ALTER TABLE train_steps ADD COLUMN verifier_errors INTEGER;
