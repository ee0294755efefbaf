-- Tips that a batch has in common with an earlier batch of the same separator. An update of such a tip whose event time
-- is before earlier_closed_at belongs to the earlier batch.
-- Grain: a tip in a batch, if an earlier batch contains it too.
-- Few tips are in several batches, and hashes of CIDs find them. DuckDB and Spark compute different hashes. A hash
-- collision only costs time.
WITH named AS (
    SELECT hash(batch_cid) AS mark
    FROM batches
    GROUP BY hash(batch_cid)
    HAVING count(*) > 1),
repeated AS (
    SELECT hash(tip) AS mark
    FROM batch_tips
    GROUP BY hash(tip)
    HAVING count(*) > 1
    UNION
    SELECT hash(i.tip) AS mark
    FROM batch_tips AS i SEMI JOIN named AS n ON n.mark = hash(i.batch_cid))
SELECT network, origin, separator_key, separator_value, batch_cid, opened_at, stream, tip, earlier_closed_at
FROM (
    SELECT b.network, b.origin, b.separator_key, b.separator_value, batch_cid, b.opened_at, i.stream, i.tip,
           lag(b.closed_at) OVER (
               PARTITION BY b.network, b.origin, b.separator_key, b.separator_value, i.stream, i.tip
               ORDER BY b.closed_at, b.opened_at, batch_cid) AS earlier_closed_at
    FROM (
        SELECT DISTINCT batch_cid, stream, tip
        FROM batch_tips AS i SEMI JOIN repeated AS r ON r.mark = hash(i.tip)) AS i
         JOIN batches AS b USING (batch_cid)) AS held
WHERE earlier_closed_at IS NOT NULL
