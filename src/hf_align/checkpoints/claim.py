"""An output folder while a run writes to it: who holds it, what the run was asked, and which files in it are ours.

Inputs are read-only: a folder that is read from is never written to. What is in the output folder already is removed
only if an earlier run wrote it, by the list that the run left; a file of the user's is never touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from hf_align import __version__
from hf_align.checkpoints.checkpoint import INDEX, SINGLE
from hf_align.checkpoints.companions import COPIED
from hf_align.checkpoints.digests import of_contents
from hf_align.checkpoints.lock import LOCK, lock_folder, make_folders, remove_empty
from hf_align.checkpoints.plan import Shard, ShardPlan
from hf_align.checkpoints.readonly import require_apart
from hf_align.errors import HfAlignError, OutputError
from hf_align.runtime.processes import Processes, current

WORK, PLAN, _ASIDE = ".hf-align", "plan.json", "kept-"
_STAGED, _SCRATCH, _PROGRESS, _WRITING = "documents", "scratch", "progress", "writing"
COMPLETE = "hf-align/complete.json"
"""Stays with a result: what it was made from, as a digest, and its files with their sizes."""
_OF_A_MODEL = (SINGLE, INDEX, "model-?????-of-?????.safetensors", "config.json", *COPIED, "*.py", "README.md",
               "alignment.safetensors", "adapter_config.json", "adapter_model.safetensors", "mergekit_config.yml",
               "hf-align", "hf-align/*")  # fmt: skip
"""What a run may write, or `from_pretrained` would read beside it."""


@dataclass(frozen=True)
class Claim:
    """An output folder that is locked against other runs.

    Attributes:
        record: what the result depends on, in order: inputs with their roles, config, options.
        overwrite: replace what another run has written or begun in the folder.
        processes: that write into it together; the first of them holds the lock.
    """

    folder: Path
    record: Mapping[str, str]
    overwrite: bool
    processes: Processes

    @property
    def work(self) -> Path:
        """The folder inside it for what is not finished yet."""
        return self.folder / WORK

    @property
    def documents(self) -> Path:
        """Where all is written that is not a shard: it comes to its place when the whole result is there."""
        return self.work / _STAGED

    @property
    def scratch(self) -> Path:
        """A place for files that are no part of the result; empty at the start, and removed at the end."""
        return self.work / _SCRATCH

    @property
    def written(self) -> list[Path]:
        """The shards of the result, where they are while it is not complete."""
        return sorted(self.documents.glob("*.safetensors")) or [self.folder / name for name in sorted(self._planned)]

    @property
    def _planned(self) -> list[str]:
        return [name for name in _sizes(_parsed(self.work / PLAN)) if name.endswith(".safetensors")]

    @property
    def resumes(self) -> bool:
        """Whether the shards in the folder are those of a run with the same record that was killed."""
        return _parsed(self.work / PLAN).get("made_from") == self._asked

    @property
    def is_complete(self) -> bool:
        """Whether the folder holds the whole result of a run with the same record, so that nothing is left to do."""
        return not self.overwrite and self._lost == []

    @property
    def _lost(self) -> list[str] | None:
        """Files of the result of such a run that are gone or of another size; None where it is no such result."""
        noted = _parsed(self.folder / COMPLETE)
        files = _sizes(noted) if noted.get("made_from") == self._digest else None
        return None if files is None else [n for n, size in files.items() if not _has_size(self.folder / n, size)]

    @property
    def _asked(self) -> list[list[str]]:
        """The record as JSON reads it again: in order, for another order of models is another result."""
        return [[what, value] for what, value in self.record.items()]

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self._asked).encode()).hexdigest()

    @property
    def progress(self) -> Path:
        """Where a long search may keep how far it got, and of which record; the folder stays while it is there."""
        return self.work / _PROGRESS

    def kept(self, name: str) -> Path | None:
        """A file that a run with the same record has put aside with `keep`; one with other contents is damaged."""
        return next((p for p in self.work.glob(f"{self._aside(name)}.*") if p.suffix == f".{of_contents(p)}"), None)

    def keep(self, name: str, save: Callable[[Path], object]) -> None:
        """Put a result aside for the run that goes on if this one is killed, in the place of one of the same name."""
        temporary = self.work / _WRITING
        with self.failing(name):
            save(temporary)
            sync(temporary)
            for before in [*self.work.glob(f"{self._aside(name)}.*")]:
                before.unlink()
            os.replace(temporary, self.work / f"{self._aside(name)}.{of_contents(temporary)}")

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """What is refused here would be refused again, so that nothing stays that was put aside."""
        try:
            yield
        except HfAlignError:
            if self.processes.leads:
                for path in self._resumable - {self.work / PLAN}:
                    path.unlink()
            raise

    def _aside(self, name: str) -> str:
        return f"{_ASIDE}{self._digest[:16]}-{name}"

    @property
    def _resumable(self) -> set[Path]:
        """What a later run can go on with."""
        noted = {self.work / PLAN, self.progress, *self.work.glob(_ASIDE + "*")}
        return {path for path in noted if path.exists()}

    # What is in the folder --------------------------------------------------------------------------------------------

    @property
    def ours(self) -> dict[str, int]:
        """Files that earlier runs have written, and their sizes; one that was changed since is the user's."""
        begun, whole = (_sizes(_parsed(path)) for path in (self.work / PLAN, self.folder / COMPLETE))
        if "made_from" in _parsed(self.folder / COMPLETE):
            begun[COMPLETE] = 0
        found = {name: path.stat().st_size for name in (*whole, *begun) if _is_file(path := self.folder / name)}
        return {name: size for name, size in found.items() if name in begun or size == whole[name]}

    def require_ours(self) -> None:
        """See that the run may write to the folder.

        Raises:
            OutputError: it holds the result of another run, or a file of the user's that the result would replace.
        """
        begun = _parsed(self.work / PLAN)
        if not (self.overwrite or self.resumes or self.is_complete):
            if begun:
                before = {str(k): v for k, v in begun.get("made_from") or []}
                other = [what for what in {**before, **self.record} if before.get(what) != self.record.get(what)]
                raise OutputError(
                    f"{self.folder} was started with other inputs or options; choose another -o, or --overwrite "
                    f"({other[0] if other else 'the order'} differs)"
                )
            if any(path != self.work for path in self.folder.iterdir()):
                state = f"is this result without its {lost[0]}" if (lost := self._lost) else "is not empty"
                raise OutputError(f"{self.folder} {state}; choose another -o, or --overwrite")
        ours, result = self.ours, self.folder / "hf-align"
        present = {path for pattern in _OF_A_MODEL for path in self.folder.glob(pattern)}
        foreign = sorted(p for p in present if p.relative_to(self.folder).as_posix() not in ours and p != result)
        if result.is_symlink() or (result.exists() and not result.is_dir()):
            foreign.append(result)
        if foreign:
            raise OutputError(f"{foreign[0]} was not written by hf-align, or was changed since, and is left alone; "
                              "move it, or choose another -o")  # fmt: skip

    def stale(self, plan: ShardPlan) -> set[str]:
        """Files of earlier runs that are no shards of this one."""
        missing = self.missing(plan)
        return self.ours.keys() - {s.file for s in plan.shards if s not in missing}

    def missing(self, plan: ShardPlan) -> list[Shard]:
        """The shards that are still to be written."""
        resumes = self.resumes
        files = {shard: self.folder / shard.file for shard in plan.shards}
        # Renamed into place, so written whole.
        return [s for s, path in files.items() if not (resumes and _has_size(path, s.file_size) and s.begins(path))]

    def require_room(self, plan: ShardPlan) -> None:
        """Refuse, before anything is computed, a disk that the missing shards do not fit on.

        Raises:
            OutputError: it is too small.
        """
        ours = self.ours
        freed = sum(ours[name] for name in self.stale(plan))
        self.require_bytes(sum(s.file_size for s in self.missing(plan)) - freed)

    def require_bytes(self, needed: int) -> None:
        """Refuse a disk on which so many bytes do not fit.

        Raises:
            OutputError: it is too small.
        """
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OutputError(f"{self.folder} has {_size(free)} free, but {_size(needed)} are needed")

    # Writing ----------------------------------------------------------------------------------------------------------

    def begin(self, plan: ShardPlan) -> None:
        """Make place for a plan, and note that it is under way."""
        ours, stale = self.ours, self.stale(plan)
        if not self.resumes and ours:
            # First of all no run owns what is there: a stale shard that outlived a kill would pass for one of this run.
            self._note([], ours)
        (self.folder / COMPLETE).unlink(missing_ok=True)
        self._remove(stale)
        self._note(self._asked, {s.file: s.file_size for s in plan.shards})

    def _note(self, asked: list[list[str]], files: Mapping[str, int]) -> None:
        noted = {"made_from": asked, "files": dict(files)}
        self._replace(f"{WORK}/{PLAN}", json.dumps(noted, indent=2).encode())

    def forget(self) -> None:
        """Remove what was written: no later run could go on with it."""
        self._remove(self.ours)
        for path in self._resumable:
            path.unlink()

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def publish(self) -> None:
        """Bring all documents to their place, and note that the result is whole."""
        if not self.resumes:
            self.begin(ShardPlan(()))
        staged = {p.relative_to(self.documents).as_posix(): p for p in sorted(self.documents.rglob("*")) if p.is_file()}
        files = {**_sizes(_parsed(self.work / PLAN)), **{name: p.stat().st_size for name, p in staged.items()}}
        ours = self.ours
        self._note(self._asked, files)
        mode = (self.work / LOCK).stat().st_mode & 0o666  # as the umask says; some libraries write 600
        for name, path in staged.items():
            final = self.folder / name
            with self.failing(name):
                if os.path.lexists(final) and name not in ours:
                    raise OutputError(f"{final} was not written by hf-align and is left alone; move it")
                final.parent.mkdir(parents=True, exist_ok=True)
                path.chmod(mode)
                sync(path)
                os.replace(path, final)
        complete = {"made_from": self._digest, "files": dict(sorted(files.items()))}
        (self.folder / COMPLETE).parent.mkdir(exist_ok=True)
        self._replace(COMPLETE, json.dumps(complete, indent=2).encode() + b"\n")
        sync(self.folder)

    def _replace(self, name: str, content: bytes) -> None:
        """Write a small file so that it is whole or not there."""
        temporary, final = self.work / _WRITING, self.folder / name
        with self.failing(name):
            temporary.write_bytes(content)
            sync(temporary)
            os.replace(temporary, final)
            sync(final.parent)

    @contextmanager
    def failing(self, name: str) -> Iterator[None]:
        """What the system refuses is one line, and leaves no half file behind that fills the disk."""
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                (self.work / name).unlink()
            raise OutputError(f"{self.folder / name} cannot be written: {error.strerror or error}") from error

    @contextmanager
    def cleaned(self) -> Iterator[None]:
        """Before and after, nothing is left that is of no use to a later run; what runs did not put there stays."""
        self._clean()
        with self.failing(_STAGED):
            self.documents.mkdir()
        try:
            yield
        finally:
            self._clean()

    def _clean(self) -> None:
        for name in (_STAGED, _SCRATCH):
            shutil.rmtree(self.work / name, ignore_errors=True)
        for path in (self.work / _WRITING, *self.work.glob("*.safetensors"), *self.work.glob("*.partial")):
            if not path.name.startswith(_ASIDE):
                path.unlink(missing_ok=True)


@contextmanager
def claimed(
    folder: Path, record: Mapping[str, str], *, reads: Iterable[Path] = (), overwrite: bool = False
) -> Iterator[Claim]:
    """Lock an output folder for one run, from before anything is computed.

    A folder inside it holds what is not finished; it stays only if a later run can go on with it. All that belongs to
    the result is written while the claim is held: a run that is killed in between is one that is not finished. One that
    is finished may be claimed again by a run with the same record, which then has nothing to do.

    Args:
        reads: files and folders that the run reads, and that no run may write to.

    Raises:
        OutputError: the folder is an input or holds one, is not writable, not empty, in use by another run, or begun
            with other inputs; it stays as it was then.
    """
    processes = current()
    claim = Claim(folder, {"hf-align": __version__, **record}, overwrite, processes)
    with ExitStack() as held:
        with processes.together():
            if processes.leads:
                require_apart(folder, reads)
                held.enter_context(_locked(claim))
        yield claim
        with processes.together():
            pass
        if processes.leads:
            if not claim.is_complete:
                claim.publish()
            for path in claim._resumable:
                path.unlink()


@contextmanager
def _locked(claim: Claim) -> Iterator[None]:
    made: list[Path] = []
    try:
        made = make_folders(claim.work)
        lock = lock_folder(claim.folder, claim.work)
    except OSError as error:
        remove_empty(made)
        is_broken = claim.folder.is_symlink() and not claim.folder.exists()
        why = "it is a link to nothing" if is_broken else error.strerror or error
        raise OutputError(f"{claim.folder} cannot be written: {why}") from error
    with lock:
        try:
            claim.require_ours()
            with claim.cleaned():
                yield
        finally:
            if not claim._resumable:
                (claim.work / LOCK).unlink(missing_ok=True)
                remove_empty([claim.work, *made])


def _size(count: int) -> str:
    """Bytes in words, so that none of two numbers that differ is nothing."""
    unit, size = next((u for u in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if count >= u[1]), ("bytes", 1))
    return f"{count / size:.2f} {unit}" if size > 1 else f"{count} bytes"


def _parsed(path: Path) -> dict[str, Any]:
    """A note of an earlier run; empty if there is none, or it is not one of ours."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _sizes(noted: Mapping[str, Any]) -> dict[str, int]:
    """The files of a note, as far as they are inside the folder, and their sizes."""
    files = noted.get("files")
    if not isinstance(files, dict):
        return {}
    return {name: size for name, size in files.items() if isinstance(size, int) and _is_inside(name)}


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.parts[:1] != (WORK,)


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _has_size(path: Path, size: int) -> bool:
    return _is_file(path) and path.stat().st_size == size


def sync(path: Path) -> None:
    """Bring a file or folder to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
