"""Running Kiln: the `kiln` command, and the embedded stack that makes a laptop a whole deployment."""
