"""Where models come from: folders, and the Hub through huggingface_hub's own means (tokens, endpoint, cache).

What is small (config, tokenizer, index, card) is fetched at once. Of weights only the headers are read, by ranges; a
shard is fetched when one of its tensors is asked for.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of httpx or of httpx2, by the version of huggingface_hub
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from hf_align.checkpoints import digests
from hf_align.checkpoints.companions import COPIED, behind_the_model
from hf_align.checkpoints.own_files import header_size, own_json
from hf_align.errors import CheckpointError, HfAlignError, first_line, one_line

T = TypeVar("T")

ADAPTER = "adapter_config.json"
"""What a LoRA adapter has in place of config.json."""
_SMALL = [*COPIED, "*.json", "*.txt", "*.jinja", "*.py", "README.md"]
_MODEL = ("model.safetensors", "model.safetensors.index.json")
_HEADER = 100_000
"""Bytes that hold the header of nearly every shard, so that one request is enough."""
_TRANSIENT = frozenset((408, 429, 500, 502, 503, 504))
_WAITS = (1, 2, 4, 8, 16)
"""Seconds before each further try, where the server asks for none."""
_LONGEST_WAIT = 300
"""Seconds that a server may ask for."""
_PART = 2**22
"""Bytes that are hashed at a time."""
_SILENCE = 60.0
"""Seconds without a byte after which a request is given up."""


@dataclass(frozen=True)
class Source:
    """Where a model is.

    Attributes:
        reference: what the user called it.
        folder: everything but weights that are still on the Hub.
        shards: those weights; None for a folder of the user's own.
        adapter: a LoRA adapter to merge into the weights as they are read.
    """

    reference: str
    folder: Path
    shards: HubShards | None = None
    adapter: Source | None = None

    @property
    def name(self) -> str:
        """What it is called before anyone: no local path; BASE+ADAPTER with an adapter."""
        return "+".join(s.own_name for s in (self, self.adapter) if s is not None)

    @property
    def own_name(self) -> str:
        """`org/name`, or the last part of a folder's path; without the adapter."""
        return self.repository or one_line(self.folder.resolve().name)

    @property
    def reads(self) -> tuple[Path, ...]:
        """The folders that are read."""
        return (self.folder, *(self.adapter.reads if self.adapter else ()))

    def record(self, role: str) -> dict[str, str]:
        """What a result made from all of its files depends on, where nobody knows yet which are read."""
        own = {"commit": self.commit} if self.commit else digests.of_folder(self.folder)
        found = {f"{role}: {self.reference}/{what}": digest for what, digest in own.items()}
        return found | (self.adapter.record(f"{role} (adapter)") if self.adapter else {})

    @property
    def doubts(self) -> list[str]:
        """A sentence if its adapter names another base."""
        config = own_json(self.adapter.folder, ADAPTER) if self.adapter is not None else None
        named = (config or {}).get("base_model_name_or_path")
        base = one_line(named.rstrip("/").rpartition("/")[2]) if isinstance(named, str) else ""
        if self.adapter is None or base in ("", self.own_name.rpartition("/")[2]):
            return []
        return [f"the adapter {self.adapter.own_name} names {base} as its base, and is merged into {self.own_name}"]

    @property
    def repository(self) -> str | None:
        """The Hub id, `org/name`."""
        return self.shards.repository if self.shards else None

    @property
    def commit(self) -> str | None:
        """The commit that was read, 40 hex digits."""
        return self.shards.commit if self.shards else None


def resolve(reference: str) -> Source:
    """Find a model: a folder as it is, or a repository, of which all but the weights is fetched.

    Args:
        reference: a folder, `org/name`, `org/name@revision`, or either with `hf://` in front; a LoRA adapter, which is
            merged into the base that its config names; or `BASE+ADAPTER`.

    Raises:
        HfAlignError: there is no such folder, repository or revision, or no access to it; an adapter without a base.
    """
    found = _resolved(reference)
    if own_json(found.folder, "config.json") is None:  # before anything else opens it
        raise CheckpointError(f"{found.repository or found.folder} has no config.json")
    return found


def _resolved(reference: str) -> Source:
    if Path(reference).is_dir() or "+" not in reference:
        found = _find(reference)
        return _with_base(found) if _is_adapter(found) else _without_adapter(found)
    model, _, lora = reference.partition("+")
    base, adapter = _find(model), _find(lora)
    if _is_adapter(base) or not _is_adapter(adapter):
        raise HfAlignError(f"{reference} is not of the form BASE+ADAPTER: an adapter has {ADAPTER} and no weights else")
    return replace(_without_adapter(base), reference=reference, adapter=adapter)


def _find(reference: str) -> Source:
    """A folder, or a repository, as it is."""
    if not reference:  # as a path it would be the folder that this is run in
        raise HfAlignError("the name of a model is empty; a folder or a Hub id such as org/name is needed")
    if Path(reference).is_dir():
        return Source(reference, Path(reference))
    repository, _, revision = reference.removeprefix("hf://").partition("@")

    def fetch(commit: str, wanted: list[str], ignored: list[str]) -> Path:
        return Path(retrying(lambda: snapshot_download(repository, revision=commit or None, allow_patterns=wanted,
                                                       ignore_patterns=ignored)))  # fmt: skip

    with plain_errors(reference):
        folder = fetch(revision, _SMALL, ["*/*"])
        behind = behind_the_model(folder)
        if behind:
            fetch(folder.name, behind, [])
    for pattern in (*_SMALL, *behind):
        for file in folder.glob(pattern):
            _verify(file, repository)
    # The cache names the folder of a snapshot after its commit.
    return Source(reference, folder, HubShards(repository, folder.name))


def _is_adapter(source: Source) -> bool:
    """Whether there is an adapter and no model beside it."""
    if not (source.folder / ADAPTER).is_file():
        return False
    return not any((source.folder / file).is_file() for file in _MODEL) and not (
        source.shards is not None and source.shards.has(_MODEL[0])
    )


def _without_adapter(model: Source) -> Source:
    """
    Raises:
        HfAlignError: an adapter lies beside its weights, so that it is loaded with them.
    """
    if (model.folder / ADAPTER).is_file():
        raise HfAlignError(
            f"{model.reference} has {ADAPTER} beside its weights, so from_pretrained loads an adapter, too; merge it "
            "with PEFT first, or take it out"
        )
    return model


def _with_base(adapter: Source) -> Source:
    """The model that an adapter belongs to, by the adapter's own config.

    Raises:
        HfAlignError: it names none, or one that cannot be found.
    """
    config = own_json(adapter.folder, ADAPTER) or {}
    model, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(model, str) or not model:
        raise HfAlignError(
            f"{adapter.reference} is an adapter and does not name its base; write BASE+{adapter.reference}"
        )
    is_folder = Path(model).is_dir()
    try:
        base = _find(f"{model}@{revision}" if revision and not is_folder else model)
    except HfAlignError as error:
        raise HfAlignError(f"{adapter.reference} is an adapter of {model} ({error}); write BASE+ADAPTER") from error
    return replace(base, reference=adapter.reference, adapter=adapter)


@dataclass(frozen=True)
class HubShards:
    """The weights of a repository at one commit, fetched file by file."""

    repository: str
    commit: str

    def has(self, file: str) -> bool:
        """Whether the repository has a file; offline, whether the cache has it."""
        if self._cached(file) is not None:
            return True
        if constants.HF_HUB_OFFLINE:
            return False
        with plain_errors(self.repository):
            return retrying(lambda: HfApi().file_exists(self.repository, file, revision=self.commit))

    def head(self, file: str) -> tuple[bytes, int]:
        """The start of a shard, its header and what may follow it; and the size of the whole shard in bytes.

        Raises:
            HfAlignError: it is not there, or the Hub cannot be reached.
        """
        cached = self._cached(file)
        if cached is not None:
            size = cached.stat().st_size
            with cached.open("rb") as opened:
                start = opened.read(8)
                return start + opened.read(header_size(start, cached)), size
        with plain_errors(self.repository):
            start, size = self._range(file, _HEADER)
            length = 8 + header_size(start, f"{self.repository}/{file}")
            return (start if length <= len(start) else self._range(file, min(length, size))[0]), size

    def is_here(self, file: str) -> bool:
        """Whether the cache has the shard."""
        return self._cached(file) is not None

    def fetch(self, file: str) -> Path:
        """The shard in the cache, downloaded if it is not there; broken downloads go on where they stopped.

        Raises:
            HfAlignError: it is not there, or the Hub cannot be reached.
        """
        was_here = self.is_here(file)
        with plain_errors(self.repository):
            path = Path(retrying(lambda: hf_hub_download(self.repository, file, revision=self.commit)))
        if not was_here:
            _verify(path, self.repository)
        return path

    def drop(self, file: str) -> None:
        """Take a shard out of the cache, unless another revision there shares its bytes."""
        link = self._cached(file)
        if link is None:
            return
        blob = link.resolve()
        link.unlink()
        snapshots = link.parents[len(Path(file).parts)]
        if not any(other.resolve() == blob for other in snapshots.rglob("*") if other.is_symlink()):
            blob.unlink(missing_ok=True)

    def _cached(self, file: str) -> Path | None:
        found = try_to_load_from_cache(self.repository, file, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def _range(self, file: str, count: int) -> tuple[bytes, int]:
        url = hf_hub_url(self.repository, file, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
        answer = http_backoff("GET", url, headers=headers, follow_redirects=True)
        hf_raise_for_status(answer)
        _, _, size = answer.headers.get("Content-Range", "").rpartition("/")
        return answer.content, int(size) if size.isdecimal() else len(answer.content)


def _verify(file: Path, repository: str) -> None:
    """See that a file of the cache has the contents that the Hub states: the cache names it after them.

    Raises:
        HfAlignError: it has others; it is taken out of the cache.
    """
    blob = file.resolve()
    if not file.is_symlink() or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
        return
    found = hashlib.sha256() if len(blob.name) == 64 else hashlib.sha1(b"blob %d\0" % blob.stat().st_size)
    with blob.open("rb") as opened:
        while part := opened.read(_PART):
            found.update(part)
    if found.hexdigest() != blob.name:
        file.unlink()
        blob.unlink(missing_ok=True)
        raise HfAlignError(f"{file.name} of {repository} differs from what the Hub describes ({blob.name}); try again")


def retrying(work: Callable[[], T]) -> T:
    """Do it again, after longer and longer waits, while what fails is a rate limit, a server or a connection."""
    _limit_time()
    for wait in _WAITS:
        try:
            return work()
        except Exception as error:
            if not _is_transient(error):
                raise
            time.sleep(min(_asked_wait(error) or wait, _LONGEST_WAIT))
    return work()


@cache
def _limit_time() -> None:
    """No request waits for ever: huggingface_hub's own client has no limits but where it downloads."""

    def limited(request: Any) -> None:
        limits = request.extensions.get("timeout", {})
        known = {kind: limits.get(kind) or _SILENCE for kind in ("connect", "read", "write", "pool")}
        request.extensions = {**request.extensions, "timeout": known}

    def client() -> Any:
        made = default_client_factory()
        made.event_hooks = {**made.event_hooks, "request": [*made.event_hooks["request"], limited]}
        return made

    set_client_factory(client)


def _is_transient(error: BaseException) -> bool:
    """Rate limits, faults of the server, broken connections; but no Hub that is not there at all."""
    if isinstance(error, LocalEntryNotFoundError):
        return isinstance(error.__cause__, HfHubHTTPError) and _is_transient(error.__cause__)
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT
    return isinstance(error, HTTPError)


def _asked_wait(error: BaseException) -> int | None:
    """Seconds that the server asks to wait."""
    if isinstance(error, HfHubHTTPError):
        asked = error.response.headers.get("Retry-After", "")
        return int(asked) if asked.isdigit() else None
    return _asked_wait(error.__cause__) if error.__cause__ else None


def said(error: BaseException) -> str:
    """What an error says, with the reason of the server, which huggingface_hub puts behind the first line."""
    first, reason = first_line(error), getattr(error, "server_message", None)
    return first if not reason or reason in first else f"{first.rstrip(':. ')}: {' '.join(reason.split())}"


def refusal(wanted: str, error: HfHubHTTPError) -> str:
    """Why the Hub does not answer as wanted, in one line."""
    if error.response.status_code == HTTPStatus.UNAUTHORIZED:
        return "the Hub rejects this token; log in again (hf auth login), or unset HF_TOKEN"
    return f"the Hub refused {wanted}: {said(error)}"


@contextmanager
def plain_errors(reference: str) -> Iterator[None]:
    """One line for whatever the Hub refuses.

    Args:
        reference: the repository, with `@revision` or without.
    """
    repository, _, revision = reference.removeprefix("hf://").partition("@")
    try:
        yield
    except HFValidationError as error:
        raise HfAlignError(f"{reference} is neither a folder nor a Hub id such as org/name") from error
    except GatedRepoError as error:
        raise HfAlignError(f"{repository} is gated; accept its terms on the Hub and log in (hf auth login)") from error
    except RevisionNotFoundError as error:
        raise HfAlignError(f"{repository} has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise HfAlignError(f"{reference} is not a folder or an accessible repository on the Hub") from error
    except LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, HfHubHTTPError):
            raise HfAlignError(refusal(repository, error.__cause__)) from error
        raise HfAlignError(
            f"{reference} is not a folder and not in the cache, and the Hub cannot be reached"
        ) from error
    except EntryNotFoundError as error:
        raise HfAlignError(f"{repository} lacks a file: {first_line(error)}") from error
    except HfHubHTTPError as error:
        raise HfAlignError(refusal(repository, error)) from error
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise HfAlignError(f"the Hub cannot be reached for {repository}: {first_line(error)}") from error
