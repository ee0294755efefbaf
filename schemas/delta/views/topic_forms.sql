-- Bytes of the topics in SUBSCRIBE, IHAVE, GRAFT, PRUNE and PUBLISH: as sent, and in other forms. as_sent: as
-- on the wire. as_names: if every topic were a name. as_indices: if every topic were an index into a topic table; an
-- unknown index counts as 2 bytes, which is correct up to index 127. with_topic_streams: with topic streams, a draft in
-- which only a SUBSCRIBE names the topic. PUBLISH counts all received copies of the messages in the table messages,
-- with the topic in the form of the stored copy.
-- Grain: a network, kind and direction.
WITH entries AS (
    SELECT network, 'SUBSCRIBE' AS kind, direction, topic_source, topic_index, topic, CAST(1 AS BIGINT) AS entries
    FROM subscriptions
    WHERE topic IS NOT NULL
    UNION ALL
    SELECT network, kind, direction, topic_source, topic_index, topic, CAST(1 AS BIGINT) AS entries
    FROM controls
    WHERE topic IS NOT NULL AND kind IN ('IHAVE', 'GRAFT', 'PRUNE')
    UNION ALL
    SELECT m.network, 'PUBLISH' AS kind, 'IN' AS direction, m.topic_source, CAST(NULL AS BIGINT) AS topic_index,
           m.topic, c.copies AS entries
    FROM messages AS m
         JOIN (SELECT network, message_id, count(*) AS copies FROM copies GROUP BY network, message_id) AS c
           ON c.network = m.network AND c.message_id = m.message_id
    WHERE m.topic IS NOT NULL),
sized AS (
    SELECT network, kind, direction, topic_source, entries,
           bit_length(topic) / 8 + CASE WHEN bit_length(topic) < 1024 THEN 2 ELSE 3 END AS name_bytes,
           CASE WHEN topic_index > 16383 THEN 4 WHEN topic_index > 127 THEN 3 ELSE 2 END AS index_bytes
    FROM entries)
SELECT network, kind, direction, CAST(sum(entries) AS BIGINT) AS entries,
       CAST(sum(CASE WHEN topic_source = 'index' THEN entries ELSE 0 END) AS BIGINT) AS by_index,
       CAST(sum(entries * CASE WHEN topic_source = 'index' THEN index_bytes ELSE name_bytes END) AS BIGINT) AS as_sent,
       CAST(sum(entries * name_bytes) AS BIGINT) AS as_names,
       CAST(sum(entries * index_bytes) AS BIGINT) AS as_indices,
       CAST(sum(CASE WHEN kind = 'SUBSCRIBE' THEN entries * name_bytes ELSE 0 END) AS BIGINT) AS with_topic_streams
FROM sized
GROUP BY network, kind, direction
