-- Delays of each new update, from its event time: until its window closed, until Kafka had its batch, and until the
-- batch was first published. Batches with the same CID share one publication.
-- Grain: a new update with a separator.
WITH announced AS (
    SELECT batch_cid, min(published_at) AS published_at
    FROM publications
    WHERE error IS NULL
    GROUP BY batch_cid)
SELECT u.network, u.origin, u.message_id, u.separator_key, u.separator_value, u.stream, u.tip, batch_cid, u.heard_at,
       u.closed_at, u.emitted_at, p.published_at,
       (epoch_us(u.closed_at) - epoch_us(u.heard_at)) / 1e6 AS seconds_to_close,
       (epoch_us(u.emitted_at) - epoch_us(u.heard_at)) / 1e6 AS seconds_to_batch,
       (epoch_us(p.published_at) - epoch_us(u.heard_at)) / 1e6 AS seconds_to_publication
FROM batched_updates AS u LEFT JOIN announced AS p USING (batch_cid)
