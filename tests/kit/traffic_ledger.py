"""Reader of the ledger files that `kiln generate --ledger` writes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kiln.deploy.demo.traffic.ledger import Entry, Ledger

_decoder = msgspec.json.Decoder(Entry)


class LedgerError(ValueError):
    """A ledger file cannot be read; the message names the line."""


def read_ledger(lines: Iterable[bytes]) -> Ledger:
    """Read what `Ledger.write` wrote.

    Raises:
        LedgerError: A line is no entry.
    """
    ledger = Ledger()
    for number, line in enumerate(lines, start=1):
        try:
            ledger.add((_decoder.decode(line),))
        except msgspec.DecodeError as error:
            raise LedgerError(f"line {number} is no ledger entry: {error}") from error
    return ledger
