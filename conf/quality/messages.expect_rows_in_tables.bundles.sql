-- Each topic that was sent as an index is in a bundle.
-- grain: a topic that no bundle has
-- level: error
-- owner: archive
-- hint: A row of bundles was lost, or a backfill used a bundle of the settings that no run has saved. Without the bundle, its indices can no longer be resolved. If topic_table.bundles has it, the next run saves it. Otherwise, restore the newest copy of the table.
-- expires: bundles
SELECT topic, min(observed_at) AS seen_at, 'no bundle has this topic' AS words
FROM (
    FROM new_messages SELECT topic, topic_source, observed_at
    UNION ALL FROM new_subscriptions SELECT topic, topic_source, observed_at
    UNION ALL FROM new_controls SELECT topic, topic_source, observed_at)
WHERE topic_source = 'index' AND topic IS NOT NULL AND topic NOT IN (SELECT unnest(topics) FROM bundles)
GROUP BY topic
