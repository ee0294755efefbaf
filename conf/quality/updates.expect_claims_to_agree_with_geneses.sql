-- No update claims a separator other than the one in the verified genesis of its stream.
-- grain: an author and a stream
-- level: warn
-- owner: sink
-- hint: An author claimed a separator other than the one in the genesis of the stream. Nothing is wrong with Kiln. The result names the author and the stream.
SELECT c.network, c.stream, c.from_peer, max(c.observed_at) AS seen_at,
    any_value(c.separator_source || ' claimed ' || c.separator_key || '/' || c.separator_value
        || ', and the genesis names ' || k.separator_key || '/' || k.separator_value) AS words
FROM updates AS c JOIN streams AS k USING (network, stream)
WHERE c.separator_source IN ('topic', 'model') AND c.separator_value <> k.separator_value
    AND (c.separator_source = 'topic' OR c.separator_key = k.separator_key)
    AND (hash(c.network, c.message_id) IN (SELECT hash(network, message_id) FROM new_updates)
        OR hash(k.network, k.stream) IN (SELECT hash(network, stream) FROM new_streams))
GROUP BY c.network, c.stream, c.from_peer
