"""Files of a model on the Hugging Face hub, into the cache of its library.

The rule: whatever keeps a file away is one error that says what to do. What comes is not believed: its hash is pinned.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub import errors as hub_errors

from nolocod.errors import BaseModelError
from nolocod.trainer.hub import cause_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_SECONDS = 30.0


def look_up(source: str, revision: str) -> tuple[str, set[str]]:
    """The commit that `revision` names, and the names of the files there. BaseModelError."""
    with _told(source, revision):
        found = HfApi().model_info(source, revision=revision, timeout=_SECONDS)
    return str(found.sha), {one.rfilename for one in found.siblings or ()}


def download(source: str, commit: str, name: str, size: int | None = None) -> Path:
    """The path of the file `name` of that commit, which is downloaded if it is not in the cache. BaseModelError.

    Where `size` is given, nothing of another size is begun: who wrote it may be a stranger.
    """
    with _told(source, commit, name):
        if isinstance(cached := try_to_load_from_cache(source, name, revision=commit), str):
            return Path(cached)
        if size is not None and (there := get_hf_file_metadata(hf_hub_url(source, name, revision=commit)).size) != size:
            raise BaseModelError(f"{source}@{commit[:12]}, {name}: the hub has {there} bytes where {size} are due.")
        return Path(hf_hub_download(source, name, revision=commit))


@contextmanager
def _told(source: str, revision: str, name: str = "") -> Iterator[None]:
    """Map what the hub's library raises."""
    what = f"{source}@{revision[:12]}" + (f", {name}" if name else "")
    try:
        yield
    except hub_errors.GatedRepoError as error:
        remedy = f"Accept its terms on the hub's page of {source}, and set HF_TOKEN to a token of yours."
        raise BaseModelError(f"{what} is gated.", remedy=remedy) from error
    except hub_errors.RevisionNotFoundError as error:
        raise BaseModelError(f"{what}: {source} has no such revision.") from error
    except hub_errors.RepositoryNotFoundError as error:
        remedy = "Check the name. For a private model set HF_TOKEN to a token of yours."
        raise BaseModelError(f"{what}: the hub has no such model, or does not show it.", remedy=remedy) from error
    except hub_errors.LocalEntryNotFoundError as error:
        raise BaseModelError(f"{what}: the hub cannot be reached, and the cache lacks it.", remedy=_OFFLINE) from error
    except hub_errors.EntryNotFoundError as error:
        raise BaseModelError(f"{what}: there is no such file.") from error
    except (hub_errors.HTTPError, hub_errors.OfflineModeIsEnabled, OSError, ValueError) as error:  # type: ignore[attr-defined] # httpx's or requests'
        raise BaseModelError(f"{what}: {cause_of(error)}.", remedy=_OFFLINE) from error


_OFFLINE = "Check the network, or give a folder with the files."
