-- The kind of query that a suite's item belongs to; NULL where the suite names none.
ALTER TABLE scores ADD COLUMN segment VARCHAR;

-- What is known of a revision's quality, and how sure that is: a mean in [0, 1], or a difference in [-1, 1] to the
-- revision `against` on the same items (`base` is the base itself; NULL: no difference but the mean), with the interval
-- of level `level`. `target` is what the interval is of: `suite`, the suite's own items, which a full read knows
-- exactly, or `task`, of which the items are a sample. `items` of the suite's `available` were read; `segment` is NULL
-- for all of them. `seconds` are what the reading took. A `digest` of NULL is the base.
CREATE TABLE estimates (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    policy VARCHAR, digest VARCHAR, base VARCHAR, suite VARCHAR, suite_version VARCHAR, segment VARCHAR,
    target VARCHAR, against VARCHAR, mean DOUBLE, low DOUBLE, high DOUBLE, level DOUBLE,
    items INTEGER, available INTEGER, seconds DOUBLE
);

-- Items that were chosen to be read because their outcome was the most telling: their mean is not the suite's, so they
-- are no `scores`. An estimate says what they showed.
CREATE TABLE readings (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    policy VARCHAR, digest VARCHAR, base VARCHAR, suite VARCHAR, suite_version VARCHAR,
    item VARCHAR, score DOUBLE, answer VARCHAR, question VARCHAR, segment VARCHAR
);
