"""The mesh: hosts, discovery, membership and the streams that exchanges run on. Only here is libp2p.

Not here: messages and states (proto), when an outer step is due (outer.loop).
"""
