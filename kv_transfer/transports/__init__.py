"""Ways for frames and payload to travel; each gives a `channel.FrameChannel`.

`inline.py` puts the payload into the messages of any byte channel (gRPC's comes from `rpc/`),
`shm.py` into memory that both ends share, `memory.py` stays within the process.
"""
