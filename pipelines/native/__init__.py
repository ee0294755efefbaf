"""Python side of the native core (native/src), which decodes frames and updates in Rust."""
