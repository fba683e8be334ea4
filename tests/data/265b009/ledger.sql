-- Rows are only ever appended. A digest of NULL is the base itself; `at` is seconds since the epoch.

CREATE TABLE scores (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    policy VARCHAR, digest VARCHAR, base VARCHAR, suite VARCHAR, suite_version VARCHAR,
    item VARCHAR, score DOUBLE, answer VARCHAR, run VARCHAR
);

CREATE TABLE observations (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    policy VARCHAR, digest VARCHAR, arm VARCHAR, unit VARCHAR, key VARCHAR, status INTEGER,
    latency_s DOUBLE, ttft_s DOUBLE, prompt_tokens INTEGER, completion_tokens INTEGER,
    route_version INTEGER, gateway VARCHAR, purpose VARCHAR
);

CREATE TABLE feedback (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    request_id VARCHAR, reward DOUBLE, key VARCHAR
);

CREATE TABLE verdicts (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    release VARCHAR, policy VARCHAR, digest VARCHAR, baseline VARCHAR, verdict VARCHAR,
    reason VARCHAR, "by" VARCHAR, evidence JSON
);

CREATE TABLE train_steps (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    policy VARCHAR, session VARCHAR, step INTEGER, digest VARCHAR, reward DOUBLE,
    importance_ratio DOUBLE, loss DOUBLE, grad_norm DOUBLE, rollout_s DOUBLE, reward_s DOUBLE,
    update_s DOUBLE, handoff_s DOUBLE, tokens INTEGER, groups_kept INTEGER, kept DOUBLE
);

CREATE TABLE loads (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    policy VARCHAR, digest VARCHAR, tier VARCHAR, bytes BIGINT, seconds DOUBLE, error VARCHAR
);

CREATE TABLE route_changes (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    policy VARCHAR, champion VARCHAR, previous VARCHAR, canary VARCHAR, weight DOUBLE,
    version INTEGER, "by" VARCHAR, reason VARCHAR
);

-- An observation with its first feedback by the same key. `seq` is the order of arrival: rows that
-- are there never move, so that evidence only ever grows.
CREATE VIEW rated AS
SELECT o.*, f.reward, f.rated_at, f.seq
FROM observations o
JOIN (
    SELECT request_id, key, arg_min(reward, rowid) AS reward, arg_min("at", rowid) AS rated_at,
        min(rowid) AS seq
    FROM feedback WHERE reward BETWEEN 0 AND 1 GROUP BY request_id, key
) f ON f.request_id = o.id AND f.key = o.key;

-- Offline score by a revision's latest run of each suite, beside what users said.
CREATE VIEW quality_per_revision AS
WITH runs AS (
    SELECT policy, digest, suite, run, count(*) AS items, avg(score) AS score, max("at") AS "at"
    FROM scores GROUP BY ALL
), offline AS (
    SELECT policy, digest, suite, arg_max(items, "at") AS items, arg_max(score, "at") AS score
    FROM runs GROUP BY ALL
), online AS (
    SELECT policy, digest, count(DISTINCT unit) AS online_units, avg(reward) AS online_reward
    FROM rated WHERE purpose = 'user' GROUP BY ALL
), judged AS (
    SELECT policy, digest, arg_max(verdict, "at") AS last_verdict FROM verdicts GROUP BY ALL
), known AS (
    SELECT policy, digest FROM offline
    UNION SELECT policy, digest FROM online
    UNION SELECT policy, digest FROM judged
)
SELECT known.policy, known.digest, suite, items, score, online_units, online_reward, last_verdict
FROM known
LEFT JOIN offline ON offline.policy IS NOT DISTINCT FROM known.policy
    AND offline.digest IS NOT DISTINCT FROM known.digest
LEFT JOIN online ON online.policy IS NOT DISTINCT FROM known.policy
    AND online.digest IS NOT DISTINCT FROM known.digest
LEFT JOIN judged ON judged.policy IS NOT DISTINCT FROM known.policy
    AND judged.digest IS NOT DISTINCT FROM known.digest;

CREATE VIEW champion_history AS
WITH changes AS (
    SELECT policy, champion, "at", version, row_number() OVER past AS number,
        lag(champion) OVER past AS before
    FROM route_changes WINDOW past AS (PARTITION BY policy ORDER BY version)
)
SELECT policy, champion, "at" AS since,
    lead("at") OVER (PARTITION BY policy ORDER BY version) AS until
FROM changes
WHERE champion IS DISTINCT FROM before OR number = 1;
-- Failures of the policy's verifier itself in a step: it raised, hung, or returned no score.

ALTER TABLE train_steps ADD COLUMN verifier_errors INTEGER;
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
-- Off-policy corrections of a step: tokens whose weight was capped, and the mean of all weights.

ALTER TABLE train_steps ADD COLUMN capped INTEGER;
ALTER TABLE train_steps ADD COLUMN correction_weight DOUBLE;
-- Router replay: share of a step's tokens whose experts the trainer would have chosen differently from the engine.

ALTER TABLE train_steps ADD COLUMN out_of_route DOUBLE;
-- A cold load's outcome (`ready`, `refused`, or `cancelled` when no request waited any longer, which is no fault of the
-- revision; NULL in older rows), its wait in the queue, its priority (`interactive` or `background`), how many requests
-- shared it, and the host tier after it. A row of tier `stored` is an eviction; its `seconds` are the adapter's time there.

ALTER TABLE loads ADD COLUMN outcome VARCHAR;
ALTER TABLE loads ADD COLUMN wait_s DOUBLE;
ALTER TABLE loads ADD COLUMN priority VARCHAR;
ALTER TABLE loads ADD COLUMN waiters INTEGER;
ALTER TABLE loads ADD COLUMN tier_adapters INTEGER;
ALTER TABLE loads ADD COLUMN tier_bytes BIGINT;

-- Each revision's loads: their number, times, waits, and the last fault.
CREATE VIEW loads_per_revision AS
SELECT policy, digest,
    count(*) FILTER (tier = 'host' AND error IS NULL) AS loads,
    count(*) FILTER (tier = 'host' AND error IS NOT NULL AND outcome IS DISTINCT FROM 'cancelled') AS faults,
    count(*) FILTER (tier = 'stored') AS evictions,
    coalesce(sum(waiters) FILTER (tier = 'host'), 0)::BIGINT AS waits,
    avg(seconds) FILTER (tier = 'host' AND error IS NULL) AS load_s,
    avg(wait_s) FILTER (tier = 'host') AS wait_s,
    max("at") AS last_at,
    arg_max(error, "at")
        FILTER (tier = 'host' AND error IS NOT NULL AND outcome IS DISTINCT FROM 'cancelled') AS last_fault
FROM loads GROUP BY policy, digest;
-- The failures that `verifier_errors` counts, by kind: exceptions, timeouts, missing scores.

ALTER TABLE train_steps ADD COLUMN verifier_faults JSON;
-- The mean share of 3-grams that an answer has repeated, and the step's warning of a collapse, if any.

ALTER TABLE train_steps ADD COLUMN repeated DOUBLE;
ALTER TABLE train_steps ADD COLUMN collapse VARCHAR;
-- The question that a revision's answer was scored on; NULL in the base's rows, which belong to no policy.

ALTER TABLE scores ADD COLUMN question VARCHAR;
-- How an answer ended (`ok`, `invalid`, `refused`, `truncated`; NULL where the gateway did not look), and a streamed
-- answer's seconds for each token after the first.

ALTER TABLE observations ADD COLUMN outcome VARCHAR;
ALTER TABLE observations ADD COLUMN token_s DOUBLE;
-- `SELECT o.*` of the view is bound when it is created.
CREATE OR REPLACE VIEW rated AS
SELECT o.*, f.reward, f.rated_at, f.seq
FROM observations o
JOIN (
    SELECT request_id, key, arg_min(reward, rowid) AS reward, arg_min("at", rowid) AS rated_at,
        min(rowid) AS seq
    FROM feedback WHERE reward BETWEEN 0 AND 1 GROUP BY request_id, key
) f ON f.request_id = o.id AND f.key = o.key;
-- The segment that a request names (NULL: none), and the pieces of a streamed answer, whose tokens nobody counts.

ALTER TABLE observations ADD COLUMN segment VARCHAR;
ALTER TABLE observations ADD COLUMN pieces INTEGER;
-- `SELECT o.*` of the view is bound when it is created.
CREATE OR REPLACE VIEW rated AS
SELECT o.*, f.reward, f.rated_at, f.seq
FROM observations o
JOIN (
    SELECT request_id, key, arg_min(reward, rowid) AS reward, arg_min("at", rowid) AS rated_at,
        min(rowid) AS seq
    FROM feedback WHERE reward BETWEEN 0 AND 1 GROUP BY request_id, key
) f ON f.request_id = o.id AND f.key = o.key;
