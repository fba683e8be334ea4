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
