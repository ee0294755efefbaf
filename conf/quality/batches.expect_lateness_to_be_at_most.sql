-- In the last hour of the table, Kafka had 99% of the LIVE batches at most 10 s after the end of their window. Late
-- batches in up to 5 minutes of this hour are ignored, because after a start, the batches of a minute or two are late.
-- grain: the table
-- level: warn
-- owner: batch
-- hint: Batches are late. Check the lag of the queries updates and batch (kiln status), and the load of the machine.
WITH newest AS (
    SELECT emitted_at, epoch_us(emitted_at) - epoch_us(closed_at) AS late FROM batches WHERE origin = 'LIVE'
        AND emitted_at >= (SELECT max(emitted_at) - INTERVAL 1 HOUR FROM batches WHERE origin = 'LIVE')
), counted AS (
    SELECT count(*) AS batches, max(emitted_at) AS seen_at, quantile_cont(late, 0.99) AS p99,
        count(DISTINCT date_trunc('minute', emitted_at)) FILTER (late > 10_000_000) AS minutes
    FROM newest
)
SELECT batches, seen_at, 'p99 ' || round(p99 / 1e6, 1) || ' s late, in ' || minutes || ' minutes' AS words
FROM counted WHERE batches >= 100 AND p99 > 10_000_000 AND minutes > 5
