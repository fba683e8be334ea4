-- What evaluators say of users' answers while a release runs: `request` is the observation's id, `digest` the revision
-- that answered (NULL: the base), `seconds` and `tokens` what the score cost. `score` lies in [0, 1]; where there is
-- none, `fault` says why.
CREATE TABLE evaluations (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    release VARCHAR, request VARCHAR, policy VARCHAR, digest VARCHAR, evaluator VARCHAR, version VARCHAR,
    score DOUBLE, fault VARCHAR, seconds DOUBLE, tokens INTEGER
);

-- Answers of a revision under release that no user saw, one for each unit: `answer` is the observation's id, `request`
-- that of the baseline's answer to the same question, which a user got by `key`. `evaluations` has the scores of both.
CREATE TABLE shadows (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    release VARCHAR, request VARCHAR, answer VARCHAR, policy VARCHAR, digest VARCHAR, unit VARCHAR, key VARCHAR
);

-- Figures that clients report of their answers, by name: `POST /v1/feedback` with `metric` and `value`.
CREATE TABLE metrics (
    id VARCHAR PRIMARY KEY, "at" DOUBLE NOT NULL, code_version VARCHAR, config_hash VARCHAR,
    request_id VARCHAR, metric VARCHAR, value DOUBLE, key VARCHAR
);
