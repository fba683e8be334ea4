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
