-- Number of received copies of each message, and the peer whose copy came first. Copies of rejected messages count too.
-- A forged copy counts for the message whose id it has.
-- Grain: a message.
-- first_peer is cut from the least text that consists of a copy's time in 18 digits and its peer. Among peers with the
-- same time, the first by name wins.
SELECT network, message_id, count(*) AS copies,
       substring(min(concat(100000000000000000 + unix_micros(observed_at), remote_peer)), 19) AS first_peer,
       min(observed_at) AS first_at,
       (unix_micros(max(observed_at)) - unix_micros(min(observed_at))) / 1e6 AS spread_seconds
FROM copies
GROUP BY network, message_id
