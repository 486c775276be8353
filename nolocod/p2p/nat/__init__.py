"""How nodes reach each other through NATs: AutoNAT, port mapping, hole punching, circuits and reservations.

Not here: connections themselves (transport).
"""
