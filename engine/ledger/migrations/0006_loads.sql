-- A cold load's outcome (`ready`, `refused`, or `cancelled`, when nobody waited for it any more: no fault of the
-- revision; unknown for those before), its wait in the queue, who asked for it (`interactive` or `background`), how
-- many shared it, and the host tier after it. A row of tier `stored` is an eviction; its `seconds` are how long the adapter had been there.

ALTER TABLE loads ADD COLUMN outcome VARCHAR;
ALTER TABLE loads ADD COLUMN wait_s DOUBLE;
ALTER TABLE loads ADD COLUMN priority VARCHAR;
ALTER TABLE loads ADD COLUMN waiters INTEGER;
ALTER TABLE loads ADD COLUMN tier_adapters INTEGER;
ALTER TABLE loads ADD COLUMN tier_bytes BIGINT;

-- What each revision's loads took: how often, how long, how long it was waited for, and the last fault.
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
