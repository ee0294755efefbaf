"""Exit codes of `kiln`, and the error of an invalid command line.

0 done; 1 the command failed; 2 the command line or the settings are wrong; 3 something that Kiln needs is missing
(an extra, Java, jars, a free port, a broker); 130 interrupted. `kiln run` exits with 0 when Ctrl-C stops it, because
that is how it normally ends. The errors with these codes are in `kiln.conf.process.errors`.
"""

from __future__ import annotations

from typing import Final

from kiln.conf.process.errors import KilnError

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
ENVIRONMENT: Final = 3
INTERRUPTED: Final = 130


class UsageError(KilnError):
    """The command line is invalid."""

    exit_code = USAGE
