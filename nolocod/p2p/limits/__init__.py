"""How much a peer, and an address group of peers, may have: bytes (`bandwidth`), connections (`connection_manager`; who may
have one at all: `connection_gater`), streams and dials (`rate_limits`). Pure counting, without sockets.

Not here: what a message may hold (proto.limits).
"""
