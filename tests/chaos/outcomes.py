"""The table faults × outcomes of several runs: `python -m chaos.outcomes FILE…` of what `--keep` wrote, as Markdown."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec


class Fault(msgspec.Struct):
    """What came of one fault."""

    kind: str
    expects: str
    seconds: float
    lost: int
    wrong: list[str]
    checked: bool = True
    """False: the run was ended before log, tables and ledger were compared"""


class Kept(msgspec.Struct):
    """One run."""

    seed: int
    began: str
    seconds: int
    faults: list[Fault]
    unplaced: list[str]


def outcomes(runs: Iterable[Kept]) -> str:
    """A row for each kind, and one for all, of the faults after which all was compared, or which failed before."""
    by_kind: dict[str, list[Fault]] = defaultdict(list)
    for run in runs:
        for fault in (each for each in run.faults if each.checked or each.wrong):
            by_kind[fault.kind].append(fault)
    lines = ["| kind | faults | held | failed | messages lost | longest | what must be |", "| --- " * 7 + "|"]
    for name, faults in sorted(by_kind.items()):
        lines.append(f"| `{name}` | {_figures(faults)} | {faults[0].expects} |")
    every = [fault for faults in by_kind.values() for fault in faults]
    return "\n".join([*lines, f"| all | {_figures(every)} | |"])


def _figures(faults: list[Fault]) -> str:
    failed = sum(bool(fault.wrong) for fault in faults)
    lost, longest = sum(fault.lost for fault in faults), max((fault.seconds for fault in faults), default=0.0)
    return f"{len(faults)} | {len(faults) - failed} | {failed} | {lost} | {longest:.0f} s"


def main() -> None:
    runs = [msgspec.json.decode(Path(name).read_bytes(), type=Kept) for name in sys.argv[1:]]
    print(outcomes(runs))
    minutes = sum(run.seconds for run in runs) / 60
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    print(f"\n{len(runs)} runs from {min(run.began for run in runs)} on, {minutes:.0f} minutes in all. Seeds: {seeds}.")
    for run in runs:
        for words in (*(each for fault in run.faults for each in fault.wrong), *run.unplaced):
            print(f"seed {run.seed}: {words}", file=sys.stderr)


if __name__ == "__main__":
    main()
