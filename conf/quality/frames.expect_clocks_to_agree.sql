-- In the last 11 minutes of the table, the clocks of each bridge and of the Kafka broker differ by at most 60 s. The
-- LIVE frame with the shortest time from capture to Kafka shows the difference, because waiting for Kafka can only add
-- to it.
-- grain: a bridge
-- level: warn
-- owner: bridge
-- hint: The clocks of the bridge and of the Kafka broker differ. Synchronize both machines, because windows and batch delays depend on both clocks. If the bridge's clock seems to be behind, the cause may instead be that Kafka was unavailable.
WITH newest AS (
    SELECT local_peer, kafka_timestamp, epoch_us(kafka_timestamp) - epoch_us(observed_at) AS delay FROM frames
    WHERE origin = 'LIVE'
        AND kafka_timestamp >= (SELECT max(kafka_timestamp) - INTERVAL 11 MINUTES FROM frames WHERE origin = 'LIVE')
)
SELECT local_peer, max(kafka_timestamp) AS seen_at, 'the clock of the bridge is ' || round(abs(min(delay)) / 1e6)::BIGINT
    || ' s ' || if(min(delay) > 0, 'behind', 'ahead of') || ' the clock of the broker' AS words
FROM newest GROUP BY local_peer HAVING abs(min(delay)) > 60_000_000
