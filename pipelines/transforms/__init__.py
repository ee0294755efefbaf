"""DataFrame in, DataFrame out: what the queries do with records."""
