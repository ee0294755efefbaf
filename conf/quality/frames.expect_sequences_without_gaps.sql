-- The frames of a connection in one direction are numbered 1, 2, 3 … without a gap. Rows from files are ignored,
-- because they have line numbers.
-- grain: a gap in the numbers of a connection
-- level: error
-- owner: bridge
-- hint: Frames were lost between the bridge and the table. While Kafka still has the records, rebuild the rows: kiln backfill run {range} --source kafka --run repair, then kiln backfill swap repair.
-- expires: frames
-- show: SELECT sequence, observed_at, remote_peer FROM frames WHERE connection = {connection} AND direction = {direction} AND sequence BETWEEN {sequence} - 2 AND {sequence} + 2 ORDER BY sequence
WITH steps AS (
    SELECT connection, direction, sequence, observed_at, coalesce(lag(sequence) OVER (
        PARTITION BY connection, direction ORDER BY sequence), 0) AS before
    FROM new_frames WHERE kafka_partition >= 0
), open_steps AS (
    SELECT s.*, (SELECT coalesce(max(f.sequence), 0) FROM frames AS f
        WHERE f.connection = s.connection AND f.direction = s.direction AND f.sequence < s.sequence
            AND f.kafka_partition >= 0) AS last
    FROM steps AS s WHERE s.sequence > s.before + 1
)
SELECT connection, direction, last + 1 AS sequence, observed_at AS seen_at,
    if(sequence = last + 2, 'frame ' || (last + 1) || ' is missing',
        'frames ' || (last + 1) || ' to ' || (sequence - 1) || ' are missing') AS words
FROM open_steps WHERE sequence > last + 1
