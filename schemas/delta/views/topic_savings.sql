-- Bytes that topic indices save in received messages, counting one copy of each message: the one in the table messages.
-- as_names is the size of the topics sent as indices if they were names; as_indices is their size as indices, of 2
-- bytes each, which is correct up to index 127.
-- Grain: a network, topic and peer that sent the copies.
SELECT network, topic, remote_peer, count(*) AS messages, count(*) FILTER (WHERE topic_source = 'index') AS by_index,
       CAST(sum(CASE WHEN topic_source = 'index' THEN name_bytes ELSE 0 END) AS BIGINT) AS as_names,
       2 * count(*) FILTER (WHERE topic_source = 'index') AS as_indices
FROM (
    SELECT network, topic, remote_peer, topic_source,
           CAST(bit_length(topic) / 8 + CASE WHEN bit_length(topic) < 1024 THEN 2 ELSE 3 END AS BIGINT) AS name_bytes
    FROM messages
    WHERE topic IS NOT NULL) AS named
GROUP BY network, topic, remote_peer
