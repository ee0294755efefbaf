-- If one direction of a connection has ended, the other has ended too. The last frame of a direction has an empty
-- payload.
-- grain: a direction without its last frame
-- level: warn
-- owner: bridge
-- hint: The end of a connection is missing in frames: the bridge was killed, or Kafka was unavailable when the connection ended. The last frames of the connection may be lost. If this happens again, check the logs of the bridge.
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
