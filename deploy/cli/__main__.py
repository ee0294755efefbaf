"""`python -m deploy.cli`: the command `kiln`."""

import sys

from deploy.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
