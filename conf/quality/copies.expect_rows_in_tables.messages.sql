-- The message of each valid copy is in messages or in quarantine.
-- grain: a valid copy without its message
-- level: error
-- owner: archive
-- hint: The message of a valid copy is neither in messages nor in quarantine: rows of messages were lost. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
-- expires: messages, quarantine, quarantine_dropped
SELECT t.network, t.message_id, t.kafka_partition, t.kafka_offset, t.message_index, observed_at AS seen_at, 'there is no such row in messages or quarantine or quarantine_dropped' AS words
FROM new_copies AS t
WHERE
    verdict NOT IN ('invalid', 'against_policy') AND kafka_partition >= 0
    AND NOT EXISTS (SELECT 1 FROM messages AS o WHERE o.network = t.network AND o.message_id = t.message_id)
    AND NOT EXISTS (SELECT 1 FROM quarantine AS o WHERE o.kafka_partition = t.kafka_partition AND o.kafka_offset = t.kafka_offset AND o.message_index = t.message_index)
    AND NOT EXISTS (SELECT 1 FROM quarantine_dropped AS o WHERE o.kafka_partition = t.kafka_partition AND o.kafka_offset = t.kafka_offset AND o.message_index = t.message_index)
