"""Ray: actors, placement groups, the controller, and the `baton` command line.

The only package that imports ray. Ray starts, watches and restarts processes; no token and no KV byte
passes through it.
"""
