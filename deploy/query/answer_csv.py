"""Query results as CSV (RFC 4180) with a header.

Values are encoded as in JSON; maps, lists and structs are JSON text. Null and empty text are empty cells. Control
characters are escaped as on the screen, so that a row is one line: `--json` has the exact text.
"""

from __future__ import annotations

import csv
import json
from typing import TextIO

from kiln.deploy.query.answer_json import encode_value
from kiln.deploy.query.ask import Answer
from kiln.schemas.printable import printable


def write_csv(answer: Answer, out: TextIO) -> None:
    """Write the rows, one per line, as they are read."""
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(map(printable, answer.columns))
    for row in answer.rows():
        writer.writerow([_encode_cell(value) for value in row])


def _encode_cell(value: object) -> str | int | float | None:
    match encode_value(value):
        case None:
            return None
        case bool(flag):
            return "true" if flag else "false"
        case int() | float() as number:
            return number
        case str(text):
            return printable(text)
        case nested:
            return json.dumps(nested)
