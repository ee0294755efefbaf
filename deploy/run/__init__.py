"""`kiln run`: starts, supervises and stops the broker, the bridge and the queries."""
