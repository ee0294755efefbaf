-- No update is in the table twice within 24 hours, the default of dedupe.signed_ttl. The key includes the message,
-- because an author who returns to an earlier tip makes a new update.
-- grain: a row that repeats an earlier row
-- level: error
-- owner: sink
-- hint: The query sink wrote an update twice within 24 hours, or the checkpoint of sink was restored from an older copy. If dedupe.signed_ttl is less than 24 hours, this is normal. Otherwise, rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
WITH repeated AS (
    SELECT hash(network, origin, message_id) AS h FROM updates
    WHERE hash(network, origin, message_id) IN (SELECT hash(network, origin, message_id) FROM new_updates)
    GROUP BY h HAVING count(*) > 1
)
SELECT network, origin, message_id, observed_at AS seen_at, 'more than one row within 24 hours' AS words
FROM updates
WHERE hash(network, origin, message_id) IN (SELECT h FROM repeated)
QUALIFY observed_at - lag(observed_at) OVER (PARTITION BY network, origin, message_id ORDER BY observed_at) < INTERVAL '24 hours'
