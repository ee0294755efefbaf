"""Operations: status, doctor, monitoring, recovery, maintenance, quarantine."""
