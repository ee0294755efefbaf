"""`python -m kiln.deploy.run.maintenance_job`: cares for the tables once, beside the queries of `kiln run`, and says in
a line of JSON for each table what was done. The settings come from the environment."""

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
    """The exit code: 0 all went well; 1 a table could not be cared for, and the last line says why."""
    os.nice(_LOWEST_PRIORITY)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    try:
        with Maintenance(load().settings, lambda _: None) as maintenance:
            cared = maintenance.once()
    except KilnError as error:
        print(error)
        return 1
    print(encode_maintenance(cared, as_lines=True))
    errors = [each.error for each in cared if each.error]
    if errors:
        print(errors[-1])
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
