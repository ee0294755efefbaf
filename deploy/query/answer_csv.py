"""The answer to a query as CSV (RFC 4180), a header first.

Times, binary and numbers are as in JSON; so are maps, lists and structs, as the JSON text of them. Null is an empty
cell, as an empty text is. What a terminal obeys is escaped as on the screen, so a text with a newline stays on one
line: `--json` has each text exactly.
"""

from __future__ import annotations

import csv
import json
from typing import TextIO

from kiln.deploy.query.answer_json import encode_value
from kiln.deploy.query.ask import Answer
from kiln.schemas.printable import printable


def write_csv(answer: Answer, out: TextIO) -> None:
    """The answer, a row a line, written as it is read."""
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(map(printable, answer.columns))
    for row in answer.rows():
        writer.writerow([_encode_cell(value) for value in row])


def _encode_cell(value: object) -> str | int | float | None:
    match encode_value(value):
        case None:
            return None
        case bool(told):
            return "true" if told else "false"
        case int() | float() as number:
            return number
        case str(text):
            return printable(text)
        case nested:
            return json.dumps(nested)
