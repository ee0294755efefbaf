"""Container images: which packages they hold, and how they are built."""
