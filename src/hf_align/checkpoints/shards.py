"""Writing checkpoints: a plan of shards made from shapes alone, and an atomic writer.

The names of all files are known before anything is computed, and each appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import tqdm
from torch import Tensor

from hf_align.checkpoints.checkpoint import INDEX, NAMES, SINGLE, bytes_of
from hf_align.errors import CheckpointError, OutputError
from hf_align.processes import Processes, current

_WORK, _PLAN, _LOCK, _ASIDE = ".hf-align", "plan.json", "lock", "kept-"
_COMPLETE = "hf-align/complete.json"
"""Stays with a result: what it was made from, as a digest, and the sizes of its files."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Shard:
    """One file to be: its name and its tensors in the order of their bytes."""

    file: str
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    @property
    def nbytes(self) -> int:
        return sum(bytes_of(shape, dtype) for _, shape, dtype in self.tensors)

    @property
    def header(self) -> bytes:
        """The safetensors header, length prefix included, padded to 8 bytes."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape, dtype in self.tensors:
            end = offset + bytes_of(shape, dtype)
            entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class ShardPlan:
    """Which tensor goes into which file, decided from shapes before anything is computed."""

    shards: tuple[Shard, ...]

    @classmethod
    def build(cls, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], max_shard_size: str) -> ShardPlan:
        """Fill shards in order up to a size such as "5GB", in the file layout of `save_pretrained`.

        Raises:
            OutputError: the size is not understood.
        """
        limit = _parse_size(max_shard_size)
        groups: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
        filled = 0
        for name, shape, dtype in tensors:
            size = bytes_of(shape, dtype)
            if groups[-1] and filled + size > limit:
                groups.append([])
                filled = 0
            groups[-1].append((name, tuple(shape), dtype))
            filled += size
        count = len(groups)
        files = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        # Wide types first keeps every tensor aligned, as in safetensors' own writer.
        ordered = [tuple(sorted(group, key=lambda t: (-t[2].itemsize, t[0]))) for group in groups]
        return cls(tuple(Shard(file, group) for file, group in zip(files, ordered, strict=True)))

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.shards)

    def index(self) -> dict[str, Any]:
        """The contents of model.safetensors.index.json."""
        weight_map = {name: s.file for s in self.shards for name, _, _ in s.tensors}
        return {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(weight_map.items()))}


@dataclass(frozen=True)
class Source:
    """Where the entries of tensors come from.

    Attributes:
        entries: (name, start, stop) -> the entries [start, stop) of a tensor laid out flat, in the planned dtype.
        most: entries that are asked for at once; None for whole tensors, in their shape.
        threads: that may ask at once.
    """

    entries: Callable[[str, int, int], Tensor]
    most: int | None = None
    threads: int = 1


def whole(produce: Callable[[str], Tensor]) -> Source:
    """A source of whole tensors, computed one after the other."""
    return Source(lambda name, start, stop: produce(name))


@dataclass(frozen=True)
class Claim:
    """An output folder that is locked against other runs.

    Attributes:
        work: the folder inside it for what is not finished yet.
        record: what the result depends on, by name: inputs, config, options.
        overwrite: replace the weights in a folder that another run has filled or begun.
        processes: that write into it together; the first of them holds the lock.
    """

    folder: Path
    work: Path
    record: Mapping[str, str]
    overwrite: bool
    processes: Processes

    @property
    def resumes(self) -> bool:
        """Whether the shards in the folder are those of a run with the same record that was killed."""
        begun = self.work / _PLAN
        return begun.is_file() and _recorded(begun) == self.record

    @property
    def is_complete(self) -> bool:
        """Whether the folder holds the whole result of a run with the same record, so that nothing is left to do."""
        if self.overwrite:
            return False
        try:
            noted = json.loads((self.folder / _COMPLETE).read_text(encoding="utf-8"))
            files = {self.folder / name: size for name, size in noted["files"].items()}
            is_ours = noted["made_from"] == self._digest
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return is_ours and all(path.is_file() and path.stat().st_size == size for path, size in files.items())

    def note_complete(self) -> None:
        """From now on the result is one that is finished."""
        if self.is_complete:
            return
        (self.folder / _COMPLETE).unlink(missing_ok=True)
        paths = sorted(p for p in self.folder.rglob("*") if p.is_file() and self.work not in p.parents)
        files = {p.relative_to(self.folder).as_posix(): p.stat().st_size for p in paths}
        (self.folder / _COMPLETE).parent.mkdir(exist_ok=True)
        _replace(self, _COMPLETE, json.dumps({"made_from": self._digest, "files": files}, indent=2).encode() + b"\n")

    @property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.record), sort_keys=True).encode()).hexdigest()

    @property
    def progress(self) -> Path:
        """Where a long search may keep how far it got, and of which record; the folder stays while it is there."""
        return self.work / "progress"

    def kept(self, name: str) -> Path | None:
        """A file that a run with the same record has put aside with `keep`."""
        path = self._aside(name)
        return path if path.is_file() else None

    def keep(self, name: str, save: Callable[[Path], object]) -> None:
        """Put a result aside for the run that goes on if this one is killed."""
        temporary = self.work / "writing"
        with _failing(self, name):
            save(temporary)
            os.replace(temporary, self._aside(name))

    def _aside(self, name: str) -> Path:
        return self.work / f"{_ASIDE}{self._digest[:16]}-{name}"

    @property
    def resumable(self) -> set[Path]:
        """What a later run can go on with."""
        noted = {self.work / _PLAN, self.progress, *self.work.glob(_ASIDE + "*")}
        return {path for path in noted if path.exists()}

    def stale(self, plan: ShardPlan) -> set[Path]:
        """Weights in the folder that are not of this run."""
        missing = self.missing(plan)
        kept = {self.folder / s.file for s in plan.shards if s not in missing}
        return (_weight_files(self.folder) | _weight_files(self.work)) - kept

    def missing(self, plan: ShardPlan) -> list[Shard]:
        """The shards that are still to be written."""
        resumes = self.resumes
        return [s for s in plan.shards if not (resumes and _is_complete(self.folder / s.file, s))]

    def require_room(self, plan: ShardPlan) -> None:
        """Refuse, before anything is computed, a disk that the missing shards do not fit on.

        Raises:
            OutputError: it is too small.
        """
        freed = sum(p.stat().st_size for p in self.stale(plan))
        needed = sum(s.nbytes + len(s.header) for s in self.missing(plan)) - freed
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OutputError(f"{self.folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed")


@contextmanager
def claimed(folder: Path, record: Mapping[str, str], *, overwrite: bool = False) -> Iterator[Claim]:
    """Lock an output folder for one run, from before anything is computed.

    A folder inside it holds what is not finished; it stays only if a later run can go on with it. All that belongs to
    the result is written while the claim is held: a run that is killed in between is one that is not finished. One that
    is finished may be claimed again by a run with the same record, which then has nothing to do.

    Raises:
        OutputError: the folder is not writable, not empty, in use by another run, or begun with other inputs; it stays
            as it was then.
    """
    processes = current()
    claim = Claim(folder, folder / _WORK, record, overwrite, processes)
    with ExitStack() as held:
        with processes.together():
            if processes.leads:
                held.enter_context(_locked(claim))
        yield claim
        with processes.together():
            pass
        if processes.leads:
            claim.note_complete()
            _remove(claim.resumable)


def is_left_unfinished(folder: Path) -> bool:
    """Whether a run that did not come to its end left the folder; not where one is still writing to it."""
    try:
        with (folder / _WORK / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return (folder / _WORK).exists()
    except OSError:
        return False
    return True


def abandon(folder: Path) -> None:
    """Forget what a run noted that did not come to its end: none can go on with it.

    Raises:
        OutputError: the run is still writing.
    """
    if (folder / _WORK).exists() and not is_left_unfinished(folder):
        raise OutputError(f"another run is writing to {folder}")
    shutil.rmtree(folder / _WORK, ignore_errors=True)


@contextmanager
def _locked(claim: Claim) -> Iterator[None]:
    is_new = not claim.folder.exists()
    try:
        claim.work.mkdir(parents=True, exist_ok=True)
        lock = (claim.work / _LOCK).open("w")
    except OSError as error:
        raise OutputError(f"{claim.folder} cannot be written: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(f"another run is writing to {claim.folder}") from error
        try:
            _require_ours(claim)
            yield
        finally:
            if not claim.resumable:
                shutil.rmtree(claim.work, ignore_errors=True)
                with suppress(OSError):  # it is not empty
                    if is_new:
                        claim.folder.rmdir()


def _require_ours(claim: Claim) -> None:
    begun = claim.work / _PLAN
    if claim.resumes or claim.is_complete:
        return
    if claim.overwrite:
        begun.unlink(missing_ok=True)
    elif begun.is_file():
        before = _recorded(begun)
        other = [what for what in {**before, **claim.record} if before.get(what) != claim.record.get(what)]
        raise OutputError(
            f"{claim.folder} was begun with other inputs or options; choose another -o, or --overwrite "
            f"({other[0] if other else 'all'} differs)"
        )
    elif any(path != claim.work for path in claim.folder.iterdir()):
        raise OutputError(f"{claim.folder} is not empty; choose another -o, or --overwrite")


def write_with_bar(claim: Claim, plan: ShardPlan, source: Source, *, quiet: bool) -> None:
    """`write_shards`, with a progress bar on the process that leads."""
    hidden = quiet or not claim.processes.leads
    with tqdm(total=plan.nbytes, desc="writing", unit="B", unit_scale=True, disable=hidden) as bar:
        write_shards(claim, plan, source, bar.update)


def write_shards(
    claim: Claim, plan: ShardPlan, source: Source, progress: Callable[[int], object] | None = None
) -> None:
    """Write every shard: temporary file, fsync, rename. A run that was killed goes on where it stopped.

    Files have their full size from the start, and every tensor, or part of one, is written into its place when it is
    ready. A shard reaches the disk while the next one is computed.

    Args:
        progress: called with bytes as they are written, and with those of the shards that are kept.

    Raises:
        OutputError: the disk is too small or fails, or a tensor is not as planned.
        CheckpointError: from the source; what was written is removed, since no later run could go on with it.
    """
    processes = claim.processes
    with processes.together():
        missing = claim.missing(plan)
        claim.require_room(plan)
    with processes.together():
        if processes.leads:
            _begin(claim, plan)
    if progress is not None:
        progress(plan.nbytes - sum(s.nbytes for s in missing))
    try:
        with processes.together():
            _write_files(claim, processes.share_of(missing, lambda s: s.nbytes), source, progress)
    except CheckpointError:
        if processes.leads:
            _remove(_weight_files(claim.folder) | _weight_files(claim.work) | claim.resumable)
        raise
    if len(plan.shards) > 1 and processes.leads:
        _replace(claim, INDEX, (json.dumps(plan.index(), indent=2) + "\n").encode())


def _write_files(claim: Claim, shards: list[Shard], source: Source, progress: Callable[[int], object] | None) -> None:
    with ThreadPoolExecutor(1) as finisher:
        finished = []
        for shard in shards:
            _fill(claim, shard, source, progress)
            finished.append(finisher.submit(_finish, claim, shard))
        for done in finished:
            done.result()


def _begin(claim: Claim, plan: ShardPlan) -> None:
    """Make place for a plan, and note that it is under way."""
    (claim.folder / _COMPLETE).unlink(missing_ok=True)
    # Before the plan is noted: a stale shard that outlived a kill here would pass for one of this run.
    _remove(claim.stale(plan))
    noted = {"made_from": dict(claim.record), "shards": {s.file: s.nbytes for s in plan.shards}}
    _replace(claim, f"{_WORK}/{_PLAN}", json.dumps(noted, indent=2).encode())


def _recorded(begun: Path) -> dict[str, str]:
    try:
        return dict(json.loads(begun.read_text(encoding="utf-8"))["made_from"])
    except (ValueError, KeyError, TypeError):  # of another version of this program
        return {}


def _weight_files(folder: Path) -> set[Path]:
    """What `from_pretrained` would load: shards of any count, and the index."""
    patterns = (SINGLE, INDEX, "model-?????-of-?????.safetensors")
    return {path for pattern in patterns for path in folder.glob(pattern)}


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()


def _is_complete(path: Path, shard: Shard) -> bool:
    """Renamed into place, so written whole; the header shows that it belongs to this plan."""
    if not path.is_file():
        return False
    header = shard.header
    with path.open("rb") as file:
        return path.stat().st_size == len(header) + shard.nbytes and file.read(len(header)) == header


@dataclass(frozen=True)
class _Piece:
    """Entries [start, stop) of a tensor, the shape in which they come, and the byte of the file where they go."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    at: int


def _pieces(shard: Shard, most: int | None) -> Iterator[_Piece]:
    at = len(shard.header)
    for name, shape, dtype in shard.tensors:
        size = math.prod(shape)
        for start in range(0, max(size, 1), most or max(size, 1)):
            stop = min(size, start + (most or size))
            yield _Piece(name, start, stop, (stop - start,) if most else shape, dtype, at + start * dtype.itemsize)
        at += size * dtype.itemsize


def _fill(claim: Claim, shard: Shard, source: Source, progress: Callable[[int], object] | None) -> None:
    """Write the temporary file of a shard."""
    # Taking the next piece of a list is atomic, so threads need no queue.
    pieces = iter(list(_pieces(shard, source.most)))
    counting = threading.Lock()

    def work(file: int) -> None:
        try:
            for piece in pieces:
                _put(file, _planned(piece, source.entries(piece.name, piece.start, piece.stop)), piece.at)
                if progress is not None:
                    with counting:
                        progress((piece.stop - piece.start) * piece.dtype.itemsize)
        finally:  # after an error the other threads find no piece any more
            deque(pieces, maxlen=0)

    with _failing(claim, shard.file), (claim.work / shard.file).open("wb", buffering=0) as file:
        # All at once, so that a full disk is noticed before anything is computed.
        os.posix_fallocate(file.fileno(), 0, len(shard.header) + shard.nbytes)
        os.pwrite(file.fileno(), shard.header, 0)
        _in_threads(lambda: work(file.fileno()), source.threads)


def _planned(piece: _Piece, tensor: Tensor) -> Tensor:
    if tuple(tensor.shape) != piece.shape or tensor.dtype != piece.dtype:
        found = f"{list(tensor.shape)} {tensor.dtype}"
        raise OutputError(f"{piece.name} came out as {found}, planned {list(piece.shape)} {piece.dtype}")
    return tensor


def _in_threads(work: Callable[[], None], threads: int) -> None:
    """Run the same work in several threads; the first error is raised when all have stopped."""
    if threads == 1:
        return work()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()


def _put(file: int, tensor: Tensor, at: int) -> None:
    view, done = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, 0
    while done < len(view):
        done += os.pwrite(file, view[done:], at + done)


def _finish(claim: Claim, shard: Shard) -> None:
    """Bring a shard to its place; also after a power cut it is whole or not there."""
    with _failing(claim, shard.file):
        _sync(claim.work / shard.file)
        os.replace(claim.work / shard.file, claim.folder / shard.file)
        _sync(claim.folder)


def _replace(claim: Claim, name: str, content: bytes) -> None:
    """Write a small file so that it is whole or not there."""
    temporary, final = claim.work / "writing", claim.folder / name
    with _failing(claim, name):
        temporary.write_bytes(content)
        _sync(temporary)
        os.replace(temporary, final)
        _sync(final.parent)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def _failing(claim: Claim, name: str) -> Iterator[None]:
    """What the system refuses is one line, and leaves no half file behind that fills the disk."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            (claim.work / name).unlink()
        raise OutputError(f"{claim.folder / name} cannot be written: {error.strerror or error}") from error


def _parse_size(size: str) -> int:
    number, unit = size[:-2], size[-2:].upper()
    if unit in _UNITS and number.strip().replace(".", "", 1).isdigit():
        return int(float(number) * _UNITS[unit])
    if size.isdigit():
        return int(size)
    raise OutputError(f"{size!r} is no shard size; write 500MB or 5GB")
