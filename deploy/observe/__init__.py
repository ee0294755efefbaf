"""How Kiln is, as plain data: snapshots of a run, status, the doctor."""
