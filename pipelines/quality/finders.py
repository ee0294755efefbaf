"""Which finder looks for what an expectation of Kiln's speaks of, and whose rows the finder reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kiln.pipelines.quality import table_checks as spanning
from kiln.pipelines.quality.model import batches_follow
from kiln.pipelines.quality.suites import SuiteCheck
from kiln.pipelines.quality.table_checks import TableCheck


def _own(check: SuiteCheck) -> Sequence[str]:
    return (check.table,)


def _own_and_named(check: SuiteCheck) -> Sequence[str]:
    named = check.arguments.get("tables") or [check.arguments["than"]]
    assert isinstance(named, list)  # the suite was checked
    return tuple(dict.fromkeys((check.table, *map(str, named))))


FINDERS: Final[Mapping[str, TableCheck]] = {
    "expect_rows_to_hold": TableCheck(spanning.rule_holds, _own),
    "expect_table_to_have_its_columns": TableCheck(spanning.columns_are_there, lambda _: ()),
    "expect_keys_to_be_unique": TableCheck(spanning.keys_are_unique, _own),
    "expect_sequences_without_gaps": TableCheck(spanning.sequences_have_no_gaps, lambda _: ("frames",)),
    "expect_connections_to_be_closed": TableCheck(spanning.connections_are_closed, lambda _: ("frames",)),
    "expect_offsets_without_holes": TableCheck(
        spanning.offsets_have_no_holes, lambda _: ("frames", "quarantine", "dropped")
    ),
    "expect_rows_in_tables": TableCheck(spanning.rows_are_in_tables, _own_and_named),
    "expect_batches_to_follow_from_updates": TableCheck(batches_follow, lambda _: ("batches", "updates")),
    "expect_claims_to_agree_with_geneses": TableCheck(spanning.claims_agree, lambda _: ("updates", "streams")),
    "expect_old_messages_not_to_flood": TableCheck(spanning.old_messages_do_not_flood, lambda _: ("copies",)),
    "expect_copies_of_a_message_to_be_at_most": TableCheck(spanning.copies_are_few, lambda _: ("copies", "messages")),
    "expect_clocks_to_agree": TableCheck(spanning.clocks_agree, lambda _: ("frames",)),
    "expect_lateness_to_be_at_most": TableCheck(spanning.batches_are_in_time, lambda _: ("batches",)),
    "expect_table_to_keep_up": TableCheck(spanning.table_keeps_up, _own_and_named),
    "expect_table_to_be_fresh": TableCheck(spanning.table_is_fresh, _own),
    "expect_volume_as_on_days_before": TableCheck(spanning.volume_is_as_before, lambda _: ("messages",)),
    "expect_quarantine_share_to_be_at_most": TableCheck(
        spanning.quarantine_is_small, lambda _: ("quarantine", "copies")
    ),
}
