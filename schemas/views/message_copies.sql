-- How many copies of each message gossip delivered, and which peer relayed the message first: of several at once, the
-- first by peer id. A forged copy bears the id of the message that the copy imitates, and counts.
-- Grain: a message.
SELECT c.network, c.message, m.type, m.topic, count(*) AS copies, count(DISTINCT c.remote_peer) AS peers,
       min(row(c.observed_at, c.remote_peer))[2] AS first_peer, min(c.observed_at) AS first_at,
       (epoch_us(max(c.observed_at)) - epoch_us(min(c.observed_at))) / 1e6 AS spread_seconds
FROM copies AS c JOIN messages AS m ON m.network = c.network AND m.message = c.message
GROUP BY c.network, c.message, m.type, m.topic
