-- Delays of each new update, from its event time: until its window closed, until Kafka had its batch, and until the
-- batch was first published. An earlier batch with the same CID has an earlier publication, which does not count.
-- Grain: a new update with a separator.
WITH announced AS (
    SELECT b.network, b.origin, batch_cid, b.closed_at, min(p.published_at) AS published_at
    FROM batches AS b JOIN publications AS p USING (batch_cid)
    WHERE b.origin = 'LIVE' AND p.published_at >= b.closed_at AND p.error IS NULL
    GROUP BY b.network, b.origin, batch_cid, b.closed_at)
SELECT network, origin, u.message_id, u.separator_key, u.separator_value, u.stream, u.tip, batch_cid, u.heard_at,
       closed_at, u.emitted_at, p.published_at,
       (unix_micros(closed_at) - unix_micros(u.heard_at)) / 1e6 AS seconds_to_close,
       (unix_micros(u.emitted_at) - unix_micros(u.heard_at)) / 1e6 AS seconds_to_batch,
       (unix_micros(p.published_at) - unix_micros(u.heard_at)) / 1e6 AS seconds_to_publication
FROM batched_updates AS u LEFT JOIN announced AS p USING (network, origin, batch_cid, closed_at)
