"""Studies of the program itself: the lab, the simulator, the testnet. Benchmarks are in tests/bench.

Not here: anything that a node needs.
"""
