-- No two rows of frames have the same key. Hashes find the few keys that may occur twice; only these keys are compared
-- in full.
-- grain: a key that several rows have
-- level: error
-- owner: bridge
-- hint: Two instances of the query archive wrote to the table, or the checkpoint of archive was restored from an older copy. Run kiln recover, which finds a checkpoint that is older than its tables. Until then, read frames with DISTINCT ON (connection, direction, sequence).
WITH repeated AS (
    SELECT hash(connection, direction, sequence) AS h FROM frames
    WHERE hash(connection, direction, sequence) IN (SELECT hash(connection, direction, sequence) FROM new_frames)
    GROUP BY h HAVING count(*) > 1
)
SELECT connection, direction, sequence, max(observed_at) AS seen_at, 'more than one row' AS words
FROM frames AS t
WHERE hash(connection, direction, sequence) IN (SELECT h FROM repeated)
GROUP BY connection, direction, sequence
HAVING count(*) > 1
