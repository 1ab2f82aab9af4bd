"""Moves KV blocks from the pool of one worker into the pool of another.

Read `session.py` first. Knows blocks, layers and bytes; knows no model, no scheduler and no request.
"""
