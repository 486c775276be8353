"""The seam between the operating system's file errors and ours."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nolocod.errors import DataDirError, DiskFullError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise DiskFullError or DataDirError for an OSError about `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"{path} could not be written: {error.strerror}.") from error
        raise DataDirError(f"{path}: {error.strerror}.") from error
