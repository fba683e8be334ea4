-- The question that a revision's answer was scored on; NULL in the base's rows, which belong to no policy.

ALTER TABLE scores ADD COLUMN question VARCHAR;
