-- Each row of subscriptions has its frame.
-- grain: a row of subscriptions without its counterpart
-- level: error
-- owner: archive
-- hint: The frame of an entry is not in frames: rows were lost. While Kafka still has them: kiln backfill run {range} --source kafka --run repair, then kiln backfill swap repair.
-- expires: frames
SELECT t.kafka_partition, t.kafka_offset, t.entry_index, observed_at AS seen_at, 'there is no such row in frames' AS words
FROM new_subscriptions AS t
WHERE
    NOT EXISTS (SELECT 1 FROM frames AS o WHERE o.kafka_partition = t.kafka_partition AND o.kafka_offset = t.kafka_offset)
