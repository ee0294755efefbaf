-- No message whose id is a hash of its content is in the table twice within 1 minute, half of the default of
-- dedupe.unsigned_ttl. After that time, equal bytes may be another message.
-- grain: a row that repeats an earlier row
-- level: error
-- owner: archive
-- hint: A message whose id is a hash of its content is in messages twice within 1 minute: two instances of the query archive ran, or its checkpoint was restored from an older copy. If dedupe.unsigned_ttl is less than 2 minutes, this is normal. Otherwise, rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
WITH repeated AS (
    SELECT hash(network, message_id) AS h FROM messages
    WHERE hash(network, message_id) IN (SELECT hash(network, message_id) FROM new_messages) AND regexp_matches(message_id, '^(unverified/)?(sha256|blake2b)/')
    GROUP BY h HAVING count(*) > 1
)
SELECT network, message_id, observed_at AS seen_at, 'more than one row within 1 minute' AS words
FROM messages
WHERE hash(network, message_id) IN (SELECT h FROM repeated) AND regexp_matches(message_id, '^(unverified/)?(sha256|blake2b)/')
QUALIFY observed_at - lag(observed_at) OVER (PARTITION BY network, message_id ORDER BY observed_at) < INTERVAL '1 minute'
