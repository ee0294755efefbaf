"""Readers of captures and logs: the bytes of a file become Frames, and unreadable items with a reason.

`formats.FORMATS` lists the readers. A reader takes an open file and yields, in file order, a `Frame` for each message
in the file, and an `UnreadableItem` for everything else, so that nothing is lost silently. Readers are pure: the caller
opens the file, names the network, and gives the capture time for a file without times (docs/design/23-others-files.md).
"""
