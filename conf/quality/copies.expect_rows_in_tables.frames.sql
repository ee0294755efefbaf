-- Each row of copies has its frame.
-- grain: a row of copies without its counterpart
-- level: error
-- owner: archive
-- hint: The frame of a copy is not in frames: rows were lost. While Kafka still has them: kiln backfill run {range} --source kafka --run repair, then kiln backfill swap repair.
-- expires: frames
SELECT t.kafka_partition, t.kafka_offset, t.message_index, observed_at AS seen_at, 'there is no such row in frames' AS words
FROM new_copies AS t
WHERE
    NOT EXISTS (SELECT 1 FROM frames AS o WHERE o.kafka_partition = t.kafka_partition AND o.kafka_offset = t.kafka_offset)
