"""Protocol code that never awaits: no sockets, no clock, no randomness; all of that is passed in.

Not here: sockets, clocks, randomness (p2p drives it).
"""
