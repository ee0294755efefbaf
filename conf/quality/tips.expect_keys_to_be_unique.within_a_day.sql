-- No tip is in the table twice, from the same source, within 24 hours, the default of dedupe.signed_ttl.
-- grain: a row that repeats an earlier row
-- level: error
-- owner: sink
-- hint: The query sink wrote a tip twice within 24 hours, or the checkpoint of sink was restored from an older copy. If dedupe.signed_ttl is less than 24 hours, this is normal. Otherwise, rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
WITH repeated AS (
    SELECT hash(network, stream, tip, source) AS h FROM tips
    WHERE hash(network, stream, tip, source) IN (SELECT hash(network, stream, tip, source) FROM new_tips)
    GROUP BY h HAVING count(*) > 1
)
SELECT network, stream, tip, source, observed_at AS seen_at, 'more than one row within 24 hours' AS words
FROM tips
WHERE hash(network, stream, tip, source) IN (SELECT h FROM repeated)
QUALIFY observed_at - lag(observed_at) OVER (PARTITION BY network, stream, tip, source ORDER BY observed_at) < INTERVAL '24 hours'
