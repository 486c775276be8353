"""`nolocod lab`: does it learn as well as the methods that it could be replaced by?

Not here: the swarm in virtual time (studies.sim), speed (tests/bench).
"""
