"""Exit codes of `kiln`, and the error of a command line that makes no sense.

0 done; 1 the command failed; 2 the command line or the settings are wrong; 3 something that Kiln needs is missing
(an extra, Java, jars, a free port, a broker); 130 interrupted. A `kiln run` that Ctrl-C stops has done its work, and
exits with 0. `kiln.conf.process.errors` has the errors that bear these codes.
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
    """The command line makes no sense."""

    exit_code = USAGE
