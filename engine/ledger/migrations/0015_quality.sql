-- What a training run made: `parent` is the revision that it continued (NULL: the base), `session` and `step` those of
-- `train_steps`, `tokens` and `seconds` the sums over its steps. Revisions from before this table have no row.
CREATE TABLE revisions (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    policy VARCHAR, digest VARCHAR, parent VARCHAR, session VARCHAR, step INTEGER, tokens BIGINT, seconds DOUBLE
);

-- What the scores from before `estimates` say: the mean of each revision's newest run, with Wilson's 95% interval.
INSERT INTO estimates BY NAME
WITH runs AS (
    SELECT policy, digest, base, suite, suite_version, config_hash, run,
        count(*) AS items, avg(score) AS mean, max("at") AS "at"
    FROM scores WHERE isfinite(score) GROUP BY ALL
), newest AS (
    SELECT policy, digest, base, suite, suite_version, config_hash,
        arg_max(items, "at") AS items, arg_max(mean, "at") AS mean, max("at") AS "at", 1.959964 ** 2 AS z
    FROM runs GROUP BY ALL
)
SELECT * EXCLUDE (z, middle, half), middle - half AS low, middle + half AS high
FROM (
    SELECT *, md5(concat_ws('/', policy, digest, base, suite, suite_version, config_hash))::UUID::VARCHAR AS id,
        'task' AS target, 0.95 AS level, (mean + z / (2 * items)) / (1 + z / items) AS middle,
        sqrt(z * greatest(0, mean * (1 - mean)) / items + (z / (2 * items)) ** 2) / (1 + z / items) AS half
    FROM newest
);

-- The newest of what is known, of all items before a part of them: one row for each revision, base, suite, version of
-- the suite, settings of the engine (`config_hash`), segment (NULL: all items) and target. The base's rows have no
-- policy and no digest.
CREATE VIEW quality AS
SELECT policy, digest, base, suite, suite_version, config_hash, segment, target, unnest(newest)
FROM (
    SELECT policy, digest, base, suite, suite_version, config_hash, segment, target, arg_max({
        'mean': mean, 'low': low, 'high': high, 'level': level, 'items': items, 'available': available,
        'seconds': seconds, 'at': "at"
    }, CASE WHEN items < available THEN "at" - 1e12 ELSE "at" END) AS newest
    FROM estimates WHERE against IS NULL GROUP BY ALL
);

-- Revisions that are surely worse than `against` on the same items: the newest interval of the difference is below 0.
CREATE VIEW regressions AS
SELECT policy, digest, against, base, suite, suite_version, config_hash, segment, target, unnest(newest), "at"
FROM (
    SELECT policy, digest, against, base, suite, suite_version, config_hash, segment, target, max("at") AS "at",
        arg_max({
            'mean': mean, 'low': low, 'high': high, 'level': level, 'items': items, 'available': available
        }, "at") AS newest
    FROM estimates WHERE against IS NOT NULL GROUP BY ALL
) WHERE newest.high < 0;

-- What a revision's training cost, its gain over its parent (the base where it has none) on the same items, and the cost
-- of one point (a hundredth) of it, NULL without a gain. A revision that was not compared with its parent has no row.
CREATE VIEW cost_per_point AS
WITH gains AS NOT MATERIALIZED (
    -- Of both targets the mean is the same.
    SELECT policy, digest, against, base, suite, suite_version, config_hash, max("at") AS "at",
        arg_max(mean, "at") AS gain
    FROM estimates WHERE against IS NOT NULL AND segment IS NULL GROUP BY ALL
)
SELECT gains.policy, gains.digest, parent, base, suite, suite_version, gains.config_hash,
    tokens AS training_tokens, seconds AS training_s, gain,
    CASE WHEN gain > 0 THEN tokens / (100 * gain) END AS tokens_per_point,
    CASE WHEN gain > 0 THEN seconds / (100 * gain) END AS seconds_per_point, gains."at"
FROM gains JOIN revisions ON revisions.policy = gains.policy AND revisions.digest = gains.digest
    AND coalesce(parent, 'base') = against;

-- How often our intervals were right: of those that a part of a suite's items gave of a policy's revisions, the share
-- that holds the value that all items gave later.
CREATE VIEW calibration AS
WITH read AS (
    SELECT policy, suite, suite_version,
        arg_max(mean, "at") FILTER (items = available) AS mean, max("at") FILTER (items = available) AS "at",
        list({'low': low, 'high': high, 'level': level, 'at': "at"}) FILTER (items < available) AS parts
    FROM estimates WHERE target = 'suite' AND digest IS NOT NULL
    GROUP BY policy, digest, base, suite, suite_version, config_hash, segment, against
), parts AS (
    SELECT policy, suite, suite_version, mean, "at", unnest(parts) AS part FROM read WHERE parts IS NOT NULL
)
SELECT policy, suite, suite_version, part.level, count(*) AS intervals,
    count(*) FILTER (mean BETWEEN part.low - 1e-9 AND part.high + 1e-9) AS held, held / intervals AS share
FROM parts WHERE part."at" <= "at" GROUP BY policy, suite, suite_version, part.level;
