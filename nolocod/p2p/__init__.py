"""The mesh: hosts, discovery, membership and the streams that exchanges run on. Only here is libp2p."""
