"""Studies of the program itself: the lab, the simulator, benchmarks, the testnet.

Not here: anything that a node needs.
"""
