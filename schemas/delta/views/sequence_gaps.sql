-- Gaps in the sequence numbers of the frames of a connection: frames that were lost between the wire and the table.
-- Frames from files are left out, because their sequence numbers are line numbers.
-- Grain: a gap in one direction of a connection.
WITH broken AS (
    SELECT connection, direction
    FROM frames
    WHERE kafka_partition >= 0
    GROUP BY connection, direction
    HAVING max(sequence) <> count(*)),
numbered AS (
    SELECT f.network, f.connection, f.direction, f.local_peer, f.remote_peer, f.sequence, f.observed_at,
           coalesce(lag(f.sequence) OVER one, 0) AS before, lag(f.observed_at) OVER one AS last_seen
    FROM frames AS f JOIN broken AS b ON b.connection = f.connection AND b.direction = f.direction
    WHERE f.kafka_partition >= 0
    WINDOW one AS (PARTITION BY f.connection, f.direction ORDER BY f.sequence))
SELECT network, lower(hex(connection)) AS connection, direction, local_peer, remote_peer, before + 1 AS first_lost,
       sequence - 1 AS last_lost, sequence - before - 1 AS lost, last_seen, observed_at AS seen_again
FROM numbered
WHERE sequence > before + 1
