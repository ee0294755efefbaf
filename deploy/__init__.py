"""Running Kiln: the `kiln` command, and the embedded stack that runs all of Kiln on a laptop."""
