-- Each frame that begins with a SUBSCRIBE or an UNSUBSCRIBE has its rows in subscriptions, numbered without a gap, or
-- is in quarantine. The first byte of the payload is the tag of the first field in the RPC (rpc.proto). Truncated
-- frames, and frames of other protocols, have no rows.
-- grain: a frame without all of its rows in subscriptions
-- level: error
-- owner: archive
-- hint: Subscriptions of a frame are missing in subscriptions: rows were lost. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
-- expires: subscriptions
WITH rows_of_frames AS (
    SELECT kafka_partition, kafka_offset, count(*) AS rows, max(entry_index) + 1 AS expected FROM subscriptions GROUP BY ALL
)
SELECT f.connection, f.direction, f.sequence, f.kafka_partition, f.kafka_offset, f.observed_at AS seen_at,
    'has ' || coalesce(rows, 0) || ' rows in subscriptions' AS words
FROM new_frames AS f LEFT JOIN rows_of_frames AS r USING (kafka_partition, kafka_offset)
WHERE f.protocol <> 'bep50' AND f.declared_length = 0
    AND (rows < expected OR rows IS NULL AND hex(payload[1:1]) = '0A'
        AND NOT EXISTS (SELECT 1 FROM quarantine AS q
            WHERE q.kafka_partition = f.kafka_partition AND q.kafka_offset = f.kafka_offset)
        AND NOT EXISTS (SELECT 1 FROM quarantine_dropped AS q
            WHERE q.kafka_partition = f.kafka_partition AND q.kafka_offset = f.kafka_offset))
