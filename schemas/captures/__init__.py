"""Readers of files that others have on disk: bytes of a file in, Frames out, and what cannot be read with its reason.

`formats.FORMATS` lists the readers. A reader takes an open file and yields, in file order, a `Frame` for each message
that the file tells of, and an `Unread` for everything else, so that nothing of a file is lost in silence. Readers are
pure: the caller opens the file, names the network, and gives the event time of a file without times
(docs/design/23-others-files.md).
"""
