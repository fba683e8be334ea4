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
