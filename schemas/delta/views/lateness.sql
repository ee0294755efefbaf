-- Delay of the batches of live traffic by minute: from the end of the window to the LogAppendTime of the batch. After
-- an outage or a catch-up this includes the downtime of Kiln.
-- Grain: a minute of event time and a network.
SELECT date_trunc('minute', closed_at) AS minute, network, count(*) AS batches,
       percentile_disc(0.5) WITHIN GROUP (ORDER BY late_seconds) AS late_p50_seconds,
       percentile_disc(0.99) WITHIN GROUP (ORDER BY late_seconds) AS late_p99_seconds,
       max(late_seconds) AS late_max_seconds
FROM batch_times
WHERE origin = 'LIVE'
GROUP BY date_trunc('minute', closed_at), network
