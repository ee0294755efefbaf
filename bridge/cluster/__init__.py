"""Several bridges of one network: which of them live, which one leads, and which one hears which topic."""
