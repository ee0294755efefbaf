"""Binding of the native core (native/src), which decodes the frames that nearly all traffic consists of."""
