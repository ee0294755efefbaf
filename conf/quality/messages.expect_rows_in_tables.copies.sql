-- Each received message has the copy from which its row was made. A batch that Kiln's node published has no copy,
-- because no peer sent it.
-- grain: a message without its copy
-- level: error
-- owner: archive
-- hint: The copy of a message is not in copies: rows of copies were lost. Rebuild the rows from frames: kiln backfill run {range} --run repair, then kiln backfill swap repair.
-- expires: copies, frames
SELECT t.network, t.message_id, t.kafka_partition, t.kafka_offset, t.message_index, observed_at AS seen_at, 'there is no such row in copies' AS words
FROM new_messages AS t
WHERE
    message_id NOT LIKE 'bep50/%'
    AND NOT EXISTS (SELECT 1 FROM copies AS o WHERE o.kafka_partition = t.kafka_partition AND o.kafka_offset = t.kafka_offset AND o.message_index = t.message_index)
    AND NOT EXISTS (SELECT 1 FROM frames AS o WHERE o.kafka_partition = t.kafka_partition AND o.kafka_offset = t.kafka_offset AND o.direction = 'OUT')
