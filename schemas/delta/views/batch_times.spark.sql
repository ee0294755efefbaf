-- Each batch, with the length of its window, its delay, and the length of the BATCH_UPDATE that announces it. The delay
-- is the time from the end of the window, in event time, to the LogAppendTime of the batch in Kafka.
-- Grain: a batch.
-- The message is {"typ":3,"sep":"…","batch":"…"}. to_json adds the quotes and escapes of JSON to the separator.
SELECT network, origin, separator_key, separator_value, batch_cid, opened_at, closed_at, emitted_at,
       stream_count, tip_count, block_bytes, (unix_micros(closed_at) - unix_micros(opened_at)) / 1e6 AS window_seconds,
       (unix_micros(emitted_at) - unix_micros(closed_at)) / 1e6 AS late_seconds,
       CAST(25 + octet_length(to_json(array(concat(separator_key, '/', separator_value)))) + length(batch_cid)
           AS BIGINT) AS message_bytes
FROM batches
