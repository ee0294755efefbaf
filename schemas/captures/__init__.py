"""Readers of captures and logs, which convert the messages in a file into Frames.

`formats.FORMATS` lists the readers. A reader takes an open file and yields, in file order, a `Frame` for each RPC or
logged message, and an `UnreadableItem` for each part that it cannot read, so that nothing is lost silently. Readers are
pure: the caller opens the file, and provides the network's name, and a time for messages without a time
(docs/design/23-others-files.md)."""
