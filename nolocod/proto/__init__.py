"""Protocol code that never awaits: messages, their limits and signatures (envelope), and the states of an exchange.

Not here: sockets, clocks, randomness (p2p drives it).
"""
