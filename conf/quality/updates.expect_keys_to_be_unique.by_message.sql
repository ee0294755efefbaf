-- No update is in the table twice within dedupe.signed_ttl.
-- The message is part of the key, because an author that returns to an earlier tip makes a new update.
-- grain: a row that repeats one of shortly before
-- level: error
-- owner: sink
-- hint: The query sink wrote an update twice, or its checkpoint was restored from an older copy. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
WITH repeated AS (
    SELECT hash(network, origin, message_id) AS h FROM updates
    WHERE hash(network, origin, message_id) IN (SELECT hash(network, origin, message_id) FROM new_updates)
    GROUP BY h HAVING count(*) > 1
)
SELECT network, origin, message_id, observed_at AS seen_at, 'more than one row within 24 hours' AS words
FROM updates
WHERE hash(network, origin, message_id) IN (SELECT h FROM repeated)
QUALIFY observed_at - lag(observed_at) OVER (PARTITION BY network, origin, message_id ORDER BY observed_at) < INTERVAL '24 hours'
