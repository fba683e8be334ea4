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
