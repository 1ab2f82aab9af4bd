"""One module per command of `baton`: `add_parser` declares its arguments, `run` does the work."""
