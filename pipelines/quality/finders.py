"""The finder of each table check, and the tables that it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kiln.pipelines.quality import table_checks
from kiln.pipelines.quality.model import check_batches_follow
from kiln.pipelines.quality.suites import SuiteCheck
from kiln.pipelines.quality.table_checks import TableCheck


def _read_own(check: SuiteCheck) -> Sequence[str]:
    return (check.table,)


def _read_own_and_named(check: SuiteCheck) -> Sequence[str]:
    named = check.arguments.get("tables") or [check.arguments["than"]]
    others = check.arguments.get("or_tables", [])
    assert isinstance(named, list)  # the suite was checked
    assert isinstance(others, list)
    return tuple(dict.fromkeys((check.table, *map(str, named), *map(str, others))))


FINDERS: Final[Mapping[str, TableCheck]] = {
    "expect_rows_to_hold": TableCheck(table_checks.check_rule, _read_own),
    "expect_table_to_have_its_columns": TableCheck(table_checks.check_columns, lambda _: ()),
    "expect_keys_to_be_unique": TableCheck(table_checks.check_unique_keys, _read_own),
    "expect_sequences_without_gaps": TableCheck(table_checks.check_sequences, lambda _: ("frames",)),
    "expect_connections_to_be_closed": TableCheck(table_checks.check_connections_closed, lambda _: ("frames",)),
    "expect_offsets_without_holes": TableCheck(
        table_checks.check_offsets, lambda _: ("frames", "quarantine", "quarantine_dropped")
    ),
    "expect_rows_in_tables": TableCheck(table_checks.check_rows_in_tables, _read_own_and_named),
    "expect_batches_to_follow_from_updates": TableCheck(check_batches_follow, lambda _: ("batches", "updates")),
    "expect_claims_to_agree_with_geneses": TableCheck(table_checks.check_claims, lambda _: ("updates", "streams")),
    "expect_old_messages_not_to_flood": TableCheck(table_checks.check_old_messages, lambda _: ("copies",)),
    "expect_copies_of_a_message_to_be_at_most": TableCheck(table_checks.check_copies, lambda _: ("copies", "messages")),
    "expect_clocks_to_agree": TableCheck(table_checks.check_clocks, lambda _: ("frames",)),
    "expect_lateness_to_be_at_most": TableCheck(table_checks.check_batch_lateness, lambda _: ("batches",)),
    "expect_table_to_keep_up": TableCheck(table_checks.check_table_lag, _read_own_and_named),
    "expect_table_to_be_fresh": TableCheck(table_checks.check_freshness, _read_own),
    "expect_volume_as_on_days_before": TableCheck(table_checks.check_volume, lambda _: ("messages",)),
    "expect_announced_messages_to_come": TableCheck(table_checks.check_announcements, lambda _: ("controls", "copies")),
    "expect_quarantine_share_to_be_at_most": TableCheck(
        table_checks.check_quarantine_share, lambda _: ("quarantine", "copies")
    ),
}
