"""Finding a run and its members: bootstrap addresses, the Kademlia DHT, the address book of remembered peers.

Not here: who is alive (membership).
"""
