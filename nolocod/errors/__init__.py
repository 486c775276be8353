"""The catalogue of errors: every failure that a user or a peer can cause, with its code, title and remedy.

The rule: an error names its culprit. A `LocalError` stops the command or the daemon with a non-zero exit status. A
`RemoteError` costs the peer that caused it one stream and some reputation, and never costs us the process.
docs/errors.md is made from `CATALOGUE`.

Not here: where an error is caught, and what is told of it (nolocod/cli.py, nolocod/p2p/transport/requests.py).
"""

from nolocod.errors.catalogue import *  # noqa: F403 - the package is the catalogue
from nolocod.errors.local import *  # noqa: F403 - the package is the catalogue
from nolocod.errors.remote import *  # noqa: F403 - the package is the catalogue
