"""A swarm in one process, on a virtual clock and a modelled network: docs/simulator.md.

Not here: methods that are compared for their loss (studies.lab).

The rule: what decides is the product's own, unchanged: rounds, the exchange's machine and its drivers, envelopes and
receipts, membership and gossip, the choice of partners. Only three things are made up: time, the network between two
nodes, and, but for learner.py, the replica. One seed gives one log, byte for byte.
"""
