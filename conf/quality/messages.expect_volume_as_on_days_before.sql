-- In the last full hour, the number of LIVE messages of each type was between a fifth and 5 times the median of the
-- same hour on up to 7 earlier days. The check passes with fewer than 3 such days or fewer than 1,000 messages.
-- grain: a type of message
-- level: warn
-- owner: archive
-- hint: The number of messages of a type has changed by more than a factor of 5. Check the bridge's peers (kiln status), the topics that it follows, and the authors of these messages (view traffic).
-- history: 9d
WITH hours AS (
    SELECT type, date_trunc('hour', observed_at) AS hour, count(*) AS n FROM messages WHERE origin = 'LIVE'
        AND observed_at >= (SELECT date_trunc('hour', max(observed_at)) - INTERVAL 8 DAYS FROM messages WHERE origin = 'LIVE')
    GROUP BY ALL
), last AS (SELECT max(hour) - INTERVAL 1 HOUR AS hour FROM hours),
days AS (
    SELECT DISTINCT h.hour FROM hours AS h, last
    WHERE h.hour < last.hour AND date_diff('hour', h.hour, last.hour) % 24 = 0
), types AS (SELECT DISTINCT type FROM hours),
before AS (
    SELECT types.type, median(coalesce(n, 0)) AS n, count(*) AS days
    FROM days CROSS JOIN types LEFT JOIN hours AS h ON h.hour = days.hour AND h.type = types.type GROUP BY types.type
), newest AS (
    SELECT types.type, coalesce(sum(n), 0) AS n
    FROM types CROSS JOIN last LEFT JOIN hours AS h ON h.hour = last.hour AND h.type = types.type GROUP BY types.type
)
SELECT type, (SELECT hour FROM last) AS seen_at,
    newest.n::BIGINT || ' in the hour, and ' || before.n::BIGINT || ' in that hour of the days before' AS words
FROM newest JOIN before USING (type)
WHERE days >= 3 AND greatest(newest.n, before.n) >= 1000 AND (newest.n > before.n * 5 OR newest.n * 5 < before.n)
