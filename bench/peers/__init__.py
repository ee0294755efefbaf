"""What a user would write instead of the query `archive`: three programs over the same topic into the same tables.

Each is short and idiomatic for its tools, and does less than Kiln: no policy of a network, no topic by index, no check
of ids. What else a program lacks stands at its top.
"""
