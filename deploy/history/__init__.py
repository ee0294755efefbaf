"""What becomes of a finished backfill run: compared with live, swapped in, dropped (docs/backfill.md)."""
