"""From a TCP socket to streams: dialling, Noise, yamux, multistream, and frames on a stream.

Not here: who the peer is to us.
"""
