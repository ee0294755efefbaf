-- No message with an author and a sequence number is in the table twice within 24 hours, the default of
-- dedupe.signed_ttl.
-- grain: a row that repeats an earlier row
-- level: error
-- owner: archive
-- hint: A message is in messages twice within 24 hours: two instances of the query archive ran, or its checkpoint was restored from an older copy. If dedupe.signed_ttl is less than 24 hours, this is normal. Otherwise, rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
WITH repeated AS (
    SELECT hash(network, message_id) AS h FROM messages
    WHERE hash(network, message_id) IN (SELECT hash(network, message_id) FROM new_messages) AND NOT regexp_matches(message_id, '^(unverified/)?(sha256|blake2b)/')
    GROUP BY h HAVING count(*) > 1
)
SELECT network, message_id, observed_at AS seen_at, 'more than one row within 24 hours' AS words
FROM messages
WHERE hash(network, message_id) IN (SELECT h FROM repeated) AND NOT regexp_matches(message_id, '^(unverified/)?(sha256|blake2b)/')
QUALIFY observed_at - lag(observed_at) OVER (PARTITION BY network, message_id ORDER BY observed_at) < INTERVAL '24 hours'
