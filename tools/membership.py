"""Print the table of docs/membership.md: what membership costs and how fast it is, in swarms of several sizes.

The rule: the nodes are the product's own Membership and Gossip (tests/modelled_swarm.py); only clock and network are modelled.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
