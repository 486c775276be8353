"""The trainer: a child process that holds the replica, and the parent's handle on it.

Not here: the outer step's arithmetic (outer.step) and anything of the network.
"""
