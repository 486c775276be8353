"""How much a peer may have: bytes, connections, streams, dials; pure counting, without sockets.

Not here: what a message may hold (proto.limits).
"""
