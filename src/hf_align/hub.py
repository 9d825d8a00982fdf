"""Where models come from: folders, and the Hub through huggingface_hub's own means (tokens, endpoint, cache)."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hf_align.errors import HfAlignError

_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py"]
# The same weights again in other layouts, which some repositories hold beside those of transformers.
_NOT = ["*/*", "consolidated*"]


def resolve(reference: str) -> Path:
    """The local folder of a model: itself if it is one, else its snapshot from the Hub.

    Args:
        reference: a folder, `org/name`, `org/name@revision`, or either with `hf://` in front.

    Raises:
        HfAlignError: there is no such folder, repository or revision, or no access to it.
    """
    if Path(reference).is_dir():
        return Path(reference)
    repository, _, revision = reference.removeprefix("hf://").partition("@")
    try:
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=_FILES, ignore_patterns=_NOT)
        )
    except HFValidationError as error:
        raise HfAlignError(f"{reference} is neither a folder nor a Hub id such as org/name") from error
    except GatedRepoError as error:
        raise HfAlignError(f"{repository} is gated; accept its terms on the Hub and log in (hf auth login)") from error
    except RevisionNotFoundError as error:
        raise HfAlignError(f"{repository} has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise HfAlignError(f"{reference} is no folder, and no repository that you can see on the Hub") from error
    except LocalEntryNotFoundError as error:
        raise HfAlignError(f"{reference} is no folder, and the Hub cannot be reached") from error
    except HfHubHTTPError as error:
        raise HfAlignError(f"the Hub refused {repository}: {str(error).splitlines()[0]}") from error
