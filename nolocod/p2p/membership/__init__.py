"""Who is in the run and alive, how that is heard, who is drawn as partner and who is banned.

Not here: how a peer is reached (nat).
"""
