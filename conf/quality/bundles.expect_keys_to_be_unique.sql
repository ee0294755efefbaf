-- No two rows of bundles have the same key.
-- The hashes find the few keys that may occur twice; only those are compared in full.
-- grain: a key that occurs again
-- level: error
-- owner: archive
-- hint: Find the second program that writes the table: only one query archive may. The duplicate rows are equal, so results are not affected.
WITH repeated AS (
    SELECT hash(hash) AS h FROM bundles
    WHERE hash(hash) IN (SELECT hash(hash) FROM new_bundles)
    GROUP BY h HAVING count(*) > 1
)
SELECT hash, max(first_seen) AS seen_at, 'more than one row' AS words
FROM bundles AS t
WHERE hash(hash) IN (SELECT h FROM repeated)
GROUP BY hash
HAVING count(*) > 1
