"""Several bridges of one network: which of them are alive, which one leads, and which one joins which topic."""
