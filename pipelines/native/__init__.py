"""Binding of the native core (native/src), which decodes the frames and updates that nearly all traffic consists of."""
