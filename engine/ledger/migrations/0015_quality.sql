-- What a training run made: `parent` is the revision that it continued (NULL: the base), `session` and `step` those of
-- `train_steps`. Revisions from before this table have no row.
CREATE TABLE revisions (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    policy VARCHAR, digest VARCHAR, parent VARCHAR, session VARCHAR, step INTEGER
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

-- The newest of what is known, one row for each revision, base, suite, version of the suite, settings of the engine
-- (`config_hash`), segment (NULL: all items) and target. The base's rows have no policy and no digest.
CREATE VIEW quality AS
SELECT policy, digest, base, suite, suite_version, config_hash, segment, target, unnest(newest), "at"
FROM (
    SELECT policy, digest, base, suite, suite_version, config_hash, segment, target, max("at") AS "at", arg_max({
        'mean': mean, 'low': low, 'high': high, 'level': level, 'items': items, 'available': available,
        'tokens': tokens, 'seconds': seconds
    }, "at") AS newest
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

-- What a revision's training and scoring cost, its gain over the base on the same version of the suite, and the cost of
-- one point (a hundredth) of it, NULL without a gain.
CREATE VIEW cost_per_point AS
WITH trained AS (
    SELECT revisions.policy, revisions.digest, sum(tokens)::BIGINT AS training_tokens,
        sum(coalesce(wait_s, rollout_s, 0) + coalesce(reward_s, 0) + coalesce(update_s, 0) + coalesce(handoff_s, 0))
            AS training_s
    FROM revisions JOIN train_steps ON train_steps.policy = revisions.policy
        AND train_steps.session = revisions.session AND train_steps.step <= revisions.step
    GROUP BY revisions.policy, revisions.digest
), known AS (
    -- Of both targets the mean is the same; 'task' is there where 'suite' is not.
    SELECT policy, digest, base, suite, suite_version, config_hash, max("at") AS "at",
        arg_max(mean, target) AS mean, max(tokens) AS tokens, max(seconds) AS seconds
    FROM quality WHERE segment IS NULL GROUP BY ALL
)
SELECT mine.policy, mine.digest, mine.base, mine.suite, mine.suite_version, mine.config_hash, training_tokens,
    training_s, mine.tokens AS scoring_tokens, mine.seconds AS scoring_s, mine.mean - theirs.mean AS gain,
    CASE WHEN gain > 0 THEN (training_tokens + coalesce(mine.tokens, 0)) / (100 * gain) END AS tokens_per_point,
    CASE WHEN gain > 0 THEN (training_s + coalesce(mine.seconds, 0)) / (100 * gain) END AS seconds_per_point,
    mine."at"
FROM known mine
LEFT JOIN known theirs ON theirs.digest IS NULL AND theirs.base = mine.base AND theirs.suite = mine.suite
    AND theirs.suite_version = mine.suite_version AND theirs.config_hash IS NOT DISTINCT FROM mine.config_hash
LEFT JOIN trained ON trained.policy = mine.policy AND trained.digest = mine.digest
WHERE mine.digest IS NOT NULL;

-- How often our intervals were right: of those that a part of a suite's items gave, the share that holds the value that
-- all items gave later.
CREATE VIEW calibration AS
WITH whole AS (
    SELECT policy, digest, base, suite, suite_version, config_hash, segment, against,
        arg_max(mean, "at") AS mean, max("at") AS "at"
    FROM estimates WHERE target = 'suite' AND items = available GROUP BY ALL
)
SELECT part.policy, part.suite, part.suite_version, part.level, count(*) AS intervals,
    count(*) FILTER (whole.mean BETWEEN part.low - 1e-9 AND part.high + 1e-9) AS held, held / intervals AS share
FROM estimates part
JOIN whole ON whole.policy IS NOT DISTINCT FROM part.policy AND whole.digest IS NOT DISTINCT FROM part.digest
    AND whole.base = part.base AND whole.suite = part.suite AND whole.suite_version = part.suite_version
    AND whole.config_hash IS NOT DISTINCT FROM part.config_hash
    AND whole.segment IS NOT DISTINCT FROM part.segment AND whole.against IS NOT DISTINCT FROM part.against
    AND whole."at" >= part."at"
WHERE part.target = 'suite' AND part.items < part.available GROUP BY ALL;
