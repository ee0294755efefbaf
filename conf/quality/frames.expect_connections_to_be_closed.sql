-- If one direction of a connection has ended, so has the other. The last frame of a direction has an empty payload.
-- grain: a direction without its last frame
-- level: warn
-- owner: bridge
-- hint: The bridge was killed, or Kafka was unavailable when a connection ended. Frames after the last one in the table are lost.
-- after: 10m
-- expires: frames
WITH ended AS (
    SELECT connection, direction, observed_at FROM new_frames
    WHERE octet_length(payload) = 0 AND protocol <> 'bep50' AND kafka_partition >= 0
)
SELECT e.connection, any_value(f.direction) AS direction, max(e.observed_at) AS seen_at,
    'the other direction has ended, and this one has no last frame' AS words
FROM ended AS e JOIN frames AS f ON f.connection = e.connection AND f.direction <> e.direction
WHERE f.kafka_partition >= 0
GROUP BY e.connection
HAVING NOT bool_or(octet_length(f.payload) = 0)
