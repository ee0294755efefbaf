"""The whole way of a batch, a stream, a tip or a message through the tables, and the question behind each step."""
