"""Finding a run and its members: bootstrap addresses, the Kademlia DHT, peers of earlier days.

Not here: who is alive (membership).
"""
