-- Tips in a batch that an earlier batch of the same separator holds too, and when that one closed. An update that was
-- heard before then is in the earlier batch.
-- Grain: a tip in a batch that holds the tip again.
-- Few tips are in several batches. To find them the ends of CIDs do: what ends alike by chance is looked at for nothing.
WITH named AS (
    SELECT right(cid, 12) AS ending
    FROM batches
    GROUP BY right(cid, 12)
    HAVING count(*) > 1),
repeated AS (
    SELECT right(tip, 12) AS ending
    FROM batch_tips
    GROUP BY right(tip, 12)
    HAVING count(*) > 1
    UNION
    SELECT right(i.tip, 12) AS ending
    FROM batch_tips AS i SEMI JOIN named AS n ON n.ending = right(i.cid, 12))
SELECT network, origin, separator_key, separator_value, cid, opened_at, stream, tip, earlier_closed_at
FROM (
    SELECT b.network, b.origin, b.separator_key, b.separator_value, b.cid, b.opened_at, i.stream, i.tip,
           lag(b.closed_at) OVER (
               PARTITION BY b.network, b.origin, b.separator_key, b.separator_value, i.stream, i.tip
               ORDER BY b.closed_at, b.opened_at, b.cid) AS earlier_closed_at
    FROM batch_tips AS i
         SEMI JOIN repeated AS r ON r.ending = right(i.tip, 12)
         JOIN batches AS b ON b.cid = i.cid) AS held
WHERE earlier_closed_at IS NOT NULL
