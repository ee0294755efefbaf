-- Each topic that was sent as an index is in a bundle.
-- grain: a topic that no bundle has
-- level: error
-- owner: archive
-- hint: The bundle of a topic that was sent as an index is not in bundles, so its indices cannot be resolved any more: a row was lost, or a backfill used a bundle from topic_table.bundles that Kiln has not stored yet. If topic_table.bundles has the bundle, start Kiln, which stores it. Otherwise, restore the newest copy of the table.
-- expires: bundles
SELECT topic, min(observed_at) AS seen_at, 'no bundle has this topic' AS words
FROM (
    FROM new_messages SELECT topic, topic_source, observed_at
    UNION ALL FROM new_subscriptions SELECT topic, topic_source, observed_at
    UNION ALL FROM new_controls SELECT topic, topic_source, observed_at)
WHERE topic_source = 'index' AND topic IS NOT NULL AND topic NOT IN (SELECT unnest(topics) FROM bundles)
GROUP BY topic
