-- Batch delay in live traffic, by minute. The delay is the time from the end of the window, in event time, to
-- the LogAppendTime of the batch in Kafka. After an outage, it includes the downtime of Kiln.
-- Grain: a minute of event time and a network.
SELECT date_trunc('minute', closed_at) AS minute, network, count(*) AS batches,
       percentile_disc(0.5) WITHIN GROUP (ORDER BY late_seconds) AS late_p50_seconds,
       percentile_disc(0.99) WITHIN GROUP (ORDER BY late_seconds) AS late_p99_seconds,
       max(late_seconds) AS late_max_seconds
FROM batch_times
WHERE origin = 'LIVE'
GROUP BY date_trunc('minute', closed_at), network
