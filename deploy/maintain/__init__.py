"""The care of the tables: once or again and again, by hand or beside the queries."""
