-- The frame of each row of copies is in frames.
-- grain: a copy without its frame
-- level: error
-- owner: archive
-- hint: The frame of a copy is not in frames: rows of frames were lost. While Kafka still has the records, rebuild the rows: kiln backfill run {range} --source kafka --run repair, then kiln backfill swap repair.
-- expires: frames
SELECT t.kafka_partition, t.kafka_offset, t.message_index, observed_at AS seen_at, 'there is no such row in frames' AS words
FROM new_copies AS t
WHERE
    NOT EXISTS (SELECT 1 FROM frames AS o WHERE o.kafka_partition = t.kafka_partition AND o.kafka_offset = t.kafka_offset)
