"""Generated from ``proto/rpc/v1`` by ``python -m rpc.generate``; not edited by hand."""
