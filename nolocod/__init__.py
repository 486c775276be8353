"""nolocod: a peer-to-peer training daemon for volunteers (NoLoCo, arXiv 2506.10911)."""

__version__ = "0.1.0"
