-- Each batch, with the length of its window, its delay, and the length of the BATCH_UPDATE that announces it. The delay
-- is the time from the end of the window, in event time, to the LogAppendTime of the batch in Kafka.
-- Grain: a batch.
-- The message is {"typ":3,"sep":"…","batch":"…"}. to_json adds the quotes and escapes of JSON to the separator.
SELECT network, origin, separator_key, separator_value, batch_cid, opened_at, closed_at, emitted_at,
       stream_count, tip_count, block_bytes, (epoch_us(closed_at) - epoch_us(opened_at)) / 1e6 AS window_seconds,
       (epoch_us(emitted_at) - epoch_us(closed_at)) / 1e6 AS late_seconds,
       CAST(27 + octet_length(encode(to_json(concat(separator_key, '/', separator_value)))) + length(batch_cid)
           AS BIGINT) AS message_bytes
FROM batches
