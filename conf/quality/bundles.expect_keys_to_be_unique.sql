-- No two rows of bundles have the same key. Hashes find the few keys that may occur twice; only these keys are compared
-- in full.
-- grain: a key that several rows have
-- level: error
-- owner: archive
-- hint: Two programs wrote the same topic bundle. Find the second one: only one instance of the query archive may write the table. Query results are not affected, because the rows are equal.
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
