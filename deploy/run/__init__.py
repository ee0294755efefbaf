"""`kiln run`: starts, supervises and stops broker, network and queries."""
