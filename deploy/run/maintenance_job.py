"""`python -m kiln.deploy.run.maintenance_job`: maintains the tables once, while the queries of `kiln run` run.

Prints a line of JSON per table. The settings come from the environment.
"""

from __future__ import annotations

import os
import sys

import pyarrow as pa

from kiln.conf.process.errors import KilnError
from kiln.conf.settings.reading import load
from kiln.deploy.ops.maintenance import Maintenance
from kiln.deploy.screens.maintain import encode_maintenance

_LOWEST_PRIORITY = 19


def main() -> int:
    """Maintain all tables.

    Returns:
        The exit code: 1 if the maintenance of a table failed, which the last line explains, else 0.
    """
    os.nice(_LOWEST_PRIORITY)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    try:
        with Maintenance(load().settings, lambda _: None) as maintenance:
            tables = maintenance.run()
    except KilnError as error:
        print(error)
        return 1
    print(encode_maintenance(tables, as_lines=True))
    errors = [each.error for each in tables if each.error]
    if errors:
        print(errors[-1])
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
