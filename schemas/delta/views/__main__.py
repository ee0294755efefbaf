"""Write the table of views into docs/SQL.md: `python -m kiln.schemas.delta.views docs/SQL.md`."""

import re
import sys
from pathlib import Path

from kiln.schemas.delta.views import markdown

_TABLE = re.compile(r"^\| view \| .*?(?=\n\n)", re.DOTALL | re.MULTILINE)

if __name__ == "__main__":
    page = Path(sys.argv[1])
    text, count = _TABLE.subn(lambda _: markdown(), page.read_text(encoding="utf-8"))
    if count != 1:
        sys.exit(f"{page} has {count} tables that begin with | view |, but must have one, which this command replaces")
    page.write_text(text, encoding="utf-8")
