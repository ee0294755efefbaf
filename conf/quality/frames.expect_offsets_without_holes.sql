-- Every offset of kiln.frames between the first and the last in the table has a row here, or is a whole frame in
-- quarantine.
-- grain: a range of offsets without rows
-- level: warn
-- owner: bridge
-- hint: Offsets of kiln.frames have no row: Kafka got a frame twice, deleted records before the query archive read them, or rows were lost. While Kafka still has the records, rebuild the rows: kiln backfill run {range} --source kafka --run repair, then kiln backfill swap repair.
-- expires: frames, quarantine
-- show: SELECT * FROM frames WHERE kafka_partition = {kafka_partition} AND kafka_offset BETWEEN {kafka_offset} - 2 AND {kafka_offset} + 2
WITH steps AS (
    SELECT kafka_partition, kafka_offset, observed_at,
        lag(kafka_offset) OVER (PARTITION BY kafka_partition ORDER BY kafka_offset) AS before
    FROM new_frames WHERE kafka_partition >= 0
), holes AS (
    SELECT kafka_partition, kafka_offset, observed_at, coalesce(before, (SELECT max(f.kafka_offset) FROM frames AS f
        WHERE f.kafka_partition = s.kafka_partition AND f.kafka_offset < s.kafka_offset)) AS before
    FROM steps AS s WHERE before IS NULL OR kafka_offset > before + 1
), refused AS (
    FROM quarantine SELECT kafka_partition, kafka_offset WHERE message_index IS NULL
    UNION FROM quarantine_dropped SELECT kafka_partition, kafka_offset WHERE message_index IS NULL
)
SELECT kafka_partition, before + 1 AS kafka_offset, observed_at AS seen_at,
    'offsets ' || (before + 1) || ' to ' || (kafka_offset - 1) || ' have no row' AS words
FROM holes AS h
WHERE kafka_offset > before + 1 + (SELECT count(*) FROM refused AS r WHERE r.kafka_partition = h.kafka_partition
    AND r.kafka_offset > h.before AND r.kafka_offset < h.kafka_offset)
