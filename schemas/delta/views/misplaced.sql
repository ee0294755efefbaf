-- Messages on the topic of the wrong separator. The right separator is in the genesis of the stream or, for a
-- BATCH_UPDATE, in the message.
-- Grain: a message and a stream that it names, or a BATCH_UPDATE.
-- Topics are parsed as in kiln.schemas.wire.topics.parse_topic. In Spark, whose regular expressions are Java's, $ also
-- matches before a final newline; the condition on right() excludes such topics.
WITH split AS (
    SELECT topic, regexp_extract(topic, '(?s)^/ceramic/[^/]+/sep/(.+)/([0-9a-z]+)$', 1) AS topic_key,
           regexp_extract(topic, '(?s)^/ceramic/[^/]+/sep/(.+)/([0-9a-z]+)$', 2) AS text
    FROM (SELECT DISTINCT topic FROM messages WHERE topic LIKE '/ceramic/%/sep/%') AS named),
topics AS (
    SELECT topic, topic_key, CASE WHEN text LIKE 'k%' THEN text ELSE concat('k', text) END AS topic_value
    FROM split
    WHERE topic_key <> '' AND length(topic_key) <= 224 AND right(topic, length(text)) = text AND text <> 'k'
      AND length(CASE WHEN text LIKE 'k%' THEN text ELSE concat('k', text) END) <= 512
      AND substring(text, 1, 3) NOT IN ('bae', 'baf', 'bag')),
about AS (
    SELECT network, origin, message_id, type, topic, stream, from_peer, observed_at
    FROM messages
    WHERE type IN ('UPDATE', 'QUERY')
    UNION ALL
    SELECT network, origin, message_id, 'RESPONSE', topic, stream, from_peer, observed_at
    FROM responses)
SELECT a.network, a.origin, a.message_id, a.type, a.topic, p.topic_key, p.topic_value, a.stream,
       s.separator_key, s.separator_value, a.from_peer, a.observed_at
FROM about AS a
     JOIN topics AS p ON p.topic = a.topic
     JOIN streams AS s ON s.network = a.network AND s.stream = a.stream
WHERE s.source = 'genesis' AND s.separator_key IS NOT NULL
  AND (s.separator_key <> p.topic_key OR s.separator_value <> p.topic_value)
UNION ALL
SELECT m.network, m.origin, m.message_id, m.type, m.topic, p.topic_key, p.topic_value, NULL AS stream,
       regexp_extract(m.sep, '(?s)^(.+)/[^/]+$', 1) AS separator_key,
       regexp_extract(m.sep, '[^/]+$', 0) AS separator_value, m.from_peer, m.observed_at
FROM messages AS m JOIN topics AS p ON p.topic = m.topic
WHERE m.type = 'BATCH_UPDATE' AND m.sep <> concat(p.topic_key, '/', p.topic_value)
