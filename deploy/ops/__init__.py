"""Operation of Kiln: status, diagnosis, monitoring, recovery, table maintenance and quarantine."""
