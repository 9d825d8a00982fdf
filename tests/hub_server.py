"""A small Hub on the loopback interface: it speaks enough of the HTTP API for the real huggingface_hub client.

Repositories, commits, LFS objects and pull requests live in memory. Every request is noted, and faults (a status, a
broken connection) can be planted by a pattern on "METHOD path".
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

_LFS = re.compile(r"\.(safetensors|bin|png|model)$")
_WHEN = "2026-01-01T00:00:00.000Z"
_RELATIONS = ("adapter", "merge", "quantized", "finetune")


@dataclass(frozen=True)
class Commit:
    """One state of a repository: path -> bytes."""

    oid: str
    message: str
    files: Mapping[str, bytes]


@dataclass
class Repository:
    """Commits by branch, oldest first."""

    owner: str
    private: bool = False
    gated: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=dict)
    pull_requests: dict[int, dict[str, Any]] = field(default_factory=dict)

    def at(self, revision: str) -> Commit:
        if revision in self.branches:
            return self.branches[revision][-1]
        for commits in self.branches.values():
            for commit in commits:
                if commit.oid == revision:
                    return commit
        raise _Refusal(404, "RevisionNotFound", f"no revision {revision}")

    def commit(self, branch: str, message: str, files: Mapping[str, bytes]) -> Commit:
        if branch not in self.branches:
            raise _Refusal(404, "RevisionNotFound", f"no branch {branch}")
        return self._append(branch, message, files)

    def branch(self, name: str, files: Mapping[str, bytes]) -> None:
        self._append(name, "initial commit", files)

    def _append(self, branch: str, message: str, files: Mapping[str, bytes]) -> Commit:
        history = self.branches.setdefault(branch, [])
        state = repr(
            (branch, len(history), message, sorted((p, hashlib.sha1(c).hexdigest()) for p, c in files.items()))
        )
        history.append(Commit(hashlib.sha1(state.encode()).hexdigest(), message, dict(files)))
        return history[-1]


@dataclass
class Fault:
    """What happens instead to the next `times` requests that match.

    Attributes:
        status: of the answer; None closes the connection without one.
        after_work: do what was asked, and lose the answer.
    """

    pattern: str
    status: int | None = None
    times: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    after_work: bool = False


class _Refusal(Exception):
    """An answer with a status that is no success."""

    def __init__(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message, **headers}


class Hub:
    """The state of the server, and what a test asks of it.

    Attributes:
        users: token -> (name, organisations in which the user may write).
        requests: "METHOD path" of every request, in order.
        ranges: (path, Range header) of every answer with a body of a file.
    """

    def __init__(self) -> None:
        self.url = ""
        self.lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.users = {"hf_alice": ("alice", ("lab",)), "hf_bob": ("bob", ())}
        self.roles = dict.fromkeys(self.users, "write")
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.ranges: list[tuple[str, str | None]] = []
        self.faults: list[Fault] = []

    def add(self, repository: str, folder: Path | Mapping[str, bytes], **kind: bool) -> str:
        """Put a folder's files on main; its commit."""
        if isinstance(folder, Path):
            folder = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        made = self.repositories.setdefault(repository, Repository(repository.split("/")[0], **kind))
        made.branch("main", folder)
        return made.at("main").oid

    def files(self, repository: str, revision: str = "main") -> Mapping[str, bytes]:
        return self.repositories[repository].at(revision).files

    def count(self, pattern: str) -> int:
        """How many requests matched."""
        return sum(bool(re.search(pattern, r)) for r in self.requests)

    def fault(self, request: str, after_work: bool) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.after_work == after_work and re.search(fault.pattern, request):
                fault.times -= 1
                return fault
        return None


def start(hub: Hub) -> str:
    """Answer for this Hub as long as this process lives; the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return hub.url


HUB = Hub()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.query = {k: v[0] for k, v in parse_qs(url.query).items()}
        request = f"{self.command} {unquote(url.path)}"
        self.body = self._read_body()
        with self.hub.lock:
            self.hub.requests.append(request)
            if (fault := self.hub.fault(request, after_work=False)) is not None:
                return self._fail(fault)
            try:
                status, headers, body = self._answer(request, unquote(url.path))
            except _Refusal as refusal:
                status, headers = refusal.status, refusal.headers
                body = json.dumps({"error": str(refusal)}).encode()
            if (fault := self.hub.fault(request, after_work=True)) is not None:
                return self._fail(fault)
        return self._send(status, headers, body)

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _fail(self, fault: Fault) -> None:
        if fault.status is None:
            self.close_connection = True
            self.connection.shutdown(2)
        else:
            self._send(fault.status, dict(fault.headers), b'{"error": "planted"}')

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # The API --------------------------------------------------------------------------------------------------------

    def _answer(self, request: str, path: str) -> tuple[int, dict[str, str], bytes]:
        for pattern, method in _ROUTES:
            if match := re.fullmatch(pattern, request):
                return method(self, **match.groupdict())
        raise _Refusal(404, "", f"no route for {request}")

    def _user(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if not token:
            return None
        if token not in self.hub.users:
            raise _Refusal(401, "", "Invalid credentials in Authorization header")
        return self.hub.users[token][0]

    def _repository(self, repo: str, *, write_to: str = "", contents: bool = False) -> Repository:
        user = self._user()
        may_write = user is not None and self._may_write(user, repo.split("/")[0])
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and not may_write):
            raise _Refusal(401 if user is None else 404, "RepoNotFound", "Repository not found")
        if contents and found.gated and not may_write:
            raise _Refusal(401 if user is None else 403, "GatedRepo", "Access to this model is restricted")
        if write_to and not (may_write or (user is not None and write_to.startswith("refs/pr/"))):
            raise _Refusal(403 if user else 401, "", "You don't have the rights to write here")
        return found

    def _may_write(self, user: str, namespace: str) -> bool:
        return any(user == name and namespace in (name, *orgs) for name, orgs in self.hub.users.values())

    def whoami(self) -> tuple[int, dict[str, str], bytes]:
        user = self._user()
        if user is None:
            raise _Refusal(401, "", "Invalid username or password.")
        token, orgs = next((token, orgs) for token, (name, orgs) in self.hub.users.items() if name == user)
        auth = {"type": "access_token", "accessToken": {"role": self.hub.roles[token]}}
        return _json({"type": "user", "name": user, "orgs": [{"name": org} for org in orgs], "auth": auth})

    def create(self) -> tuple[int, dict[str, str], bytes]:
        asked = json.loads(self.body)
        user = self._user()
        if user is None:
            raise _Refusal(401, "", "Invalid username or password.")
        namespace = asked["organization"] or user
        if not self._may_write(user, namespace):
            raise _Refusal(403, "", f"You don't have the rights to create a model under the namespace {namespace}")
        name = f"{namespace}/{asked['name']}"
        made = {"url": f"{self.hub.url}/{name}", "name": name}
        if name in self.hub.repositories:
            return 409, {}, json.dumps({**made, "error": "You already created this model repo"}).encode()
        self.hub.add(
            name, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=asked.get("visibility") == "private"
        )
        return _json(made)

    def validate(self) -> tuple[int, dict[str, str], bytes]:
        front = json.loads(self.body)["content"].split("---")
        data = yaml.safe_load(front[1]) if len(front) > 2 else {}
        errors = []
        if data.get("base_model_relation", "merge") not in _RELATIONS:
            errors.append({"message": f'"base_model_relation" must be one of {_RELATIONS}'})
        for base in data.get("base_model", []):
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
                errors.append({"message": f'"base_model" {base} is not a valid model id'})
        return (400 if errors else 200), {}, json.dumps({"errors": errors, "warnings": []}).encode()

    def info(self, repo: str, revision: str = "main") -> tuple[int, dict[str, str], bytes]:
        found = self._repository(repo)
        commit = found.at(revision)
        card = commit.files.get("README.md", b"").decode().split("---")
        data = yaml.safe_load(card[1]) if len(card) > 2 else {}
        return _json({
            "id": repo, "sha": commit.oid, "private": found.private, "gated": "auto" if found.gated else False,
            "siblings": [{"rfilename": p} for p in commit.files], "tags": data.get("tags", []), "cardData": data,
        })  # fmt: skip

    def tree(self, repo: str, revision: str) -> tuple[int, dict[str, str], bytes]:
        commit = self._repository(repo).at(revision)
        return _json([_entry(path, content) for path, content in commit.files.items()])

    def refs(self, repo: str) -> tuple[int, dict[str, str], bytes]:
        found = self._repository(repo)
        heads = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": c[-1].oid} for b, c in found.branches.items()]
        return _json({"branches": heads, "tags": [], "converts": []})

    def resolve(self, repo: str, revision: str, path: str) -> tuple[int, dict[str, str], bytes]:
        commit = self._repository(repo, contents=True).at(revision)
        if path not in commit.files:
            raise _Refusal(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": commit.oid})
        content = commit.files[path]
        entry = _entry(path, content)
        headers = {"X-Repo-Commit": commit.oid}
        if "lfs" not in entry:
            return self._range(path, content, {**headers, "ETag": f'"{entry["oid"]}"'})
        oid = entry["lfs"]["oid"]
        self.hub.objects[oid] = content
        linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        return 302, {**headers, **linked, "Location": f"{self._elsewhere()}/cdn/{oid}/{path}"}, b""

    def _elsewhere(self) -> str:
        """This server under another name: the client does not follow the first answer from host to host."""
        return self.hub.url.replace("127.0.0.1", "localhost")

    def cdn(self, oid: str, path: str) -> tuple[int, dict[str, str], bytes]:
        return self._range(path, self.hub.objects[oid], {"ETag": f'"{oid}"'})

    def _range(self, path: str, content: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        asked = self.headers.get("Range")
        if self.command == "GET":
            self.hub.ranges.append((path, asked))
        headers["Accept-Ranges"] = "bytes"
        if asked is None:
            return 200, headers, content
        first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", asked).groups()  # type: ignore[union-attr]
        begin = int(first)
        end = min(int(last) + 1 if last else len(content), len(content))
        if begin >= len(content):
            raise _Refusal(416, "", "range", **{"Content-Range": f"bytes */{len(content)}"})
        return 206, {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}, content[begin:end]

    def preupload(self, repo: str, revision: str) -> tuple[int, dict[str, str], bytes]:
        files = self._repository(repo, write_to=revision).at(revision).files
        answers = []
        for asked in json.loads(self.body)["files"]:
            path = asked["path"]
            entry = _entry(path, files[path]) if path in files else None
            oid = entry["lfs"]["oid"] if entry and "lfs" in entry else entry["oid"] if entry else None
            mode = "lfs" if _LFS.search(path) else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return _json({"files": answers})

    def batch(self, repo: str) -> tuple[int, dict[str, str], bytes]:
        payload = json.loads(self.body)
        self._repository(repo, write_to=payload.get("ref", {"name": "main"})["name"])
        answers = []
        for asked in payload["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.objects:
                answer["actions"] = {
                    "upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"},
                    "verify": {"href": f"{self.hub.url}/{repo}.git/info/lfs/objects/verify"},
                }
            answers.append(answer)
        return _json({"transfer": "basic", "objects": answers})

    def upload(self, oid: str) -> tuple[int, dict[str, str], bytes]:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _Refusal(400, "", "the hash does not match")
        self.hub.objects[oid] = self.body
        return 200, {"ETag": f'"{oid}"'}, b""

    def verify(self, repo: str) -> tuple[int, dict[str, str], bytes]:
        asked = json.loads(self.body)
        if len(self.hub.objects.get(asked["oid"], b"")) != asked["size"]:
            raise _Refusal(422, "", "not uploaded")
        return _json({})

    def commit(self, repo: str, revision: str) -> tuple[int, dict[str, str], bytes]:
        found = self._repository(repo, write_to=revision)
        files = dict(found.at(revision).files)
        message = ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise _Refusal(400, "", "the object is not there")
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise _Refusal(400, "", f"unknown operation {entry['key']}")
        made = found.commit(revision, message, files)
        return _json({"commitUrl": f"{self.hub.url}/{repo}/commit/{made.oid}", "commitOid": made.oid, "success": True})

    def open_discussion(self, repo: str) -> tuple[int, dict[str, str], bytes]:
        found = self._repository(repo)
        user = self._user()
        if user is None:
            raise _Refusal(401, "", "log in first")
        asked = json.loads(self.body)
        number = len(found.pull_requests) + 1
        found.pull_requests[number] = {
            "num": number, "title": asked["title"], "author": {"name": user}, "status": "draft", "createdAt": _WHEN,
            "repo": {"name": repo, "type": "model"}, "isPullRequest": asked["pullRequest"], "events": [],
            "changes": {"base": "refs/heads/main"}, "filesWithConflicts": [],
        }  # fmt: skip
        found.branch(f"refs/pr/{number}", found.at("main").files)
        return _json({"num": number})

    def discussion(self, repo: str, number: str) -> tuple[int, dict[str, str], bytes]:
        return _json(self._repository(repo).pull_requests[int(number)])

    def change_status(self, repo: str, number: str) -> tuple[int, dict[str, str], bytes]:
        request = self._repository(repo).pull_requests[int(number)]
        request["status"] = json.loads(self.body)["status"]
        event = {"id": "0", "type": "status-change", "createdAt": _WHEN, "data": {"status": request["status"]}}
        return _json({"newStatus": event})


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
    entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if _LFS.search(path):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_ROUTES: tuple[tuple[str, Callable[..., tuple[int, dict[str, str], bytes]]], ...] = (
    (r"GET /api/whoami-v2", _Handler.whoami),
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", _Handler.validate),
    (rf"GET /api/models/{_REPO}", _Handler.info),
    (rf"GET /api/models/{_REPO}/revision/(?P<revision>.+)", _Handler.info),
    (rf"GET /api/models/{_REPO}/tree/(?P<revision>.+)", _Handler.tree),
    (rf"GET /api/models/{_REPO}/refs", _Handler.refs),
    (rf"POST /api/models/{_REPO}/preupload/(?P<revision>.+)", _Handler.preupload),
    (rf"POST /api/models/{_REPO}/commit/(?P<revision>.+)", _Handler.commit),
    (rf"POST /api/models/{_REPO}/discussions", _Handler.open_discussion),
    (rf"GET /api/models/{_REPO}/discussions/(?P<number>\d+)", _Handler.discussion),
    (rf"POST /api/models/{_REPO}/discussions/(?P<number>\d+)/status", _Handler.change_status),
    (r"POST /(?P<repo>[^/]+/.+)\.git/info/lfs/objects/batch", _Handler.batch),
    (r"POST /(?P<repo>[^/]+/.+)\.git/info/lfs/objects/verify", _Handler.verify),
    (r"PUT /lfs/(?P<oid>[0-9a-f]{64})", _Handler.upload),
    (r"(?:GET|HEAD) /cdn/(?P<oid>[0-9a-f]{64})/(?P<path>.+)", _Handler.cdn),
    (rf"(?:GET|HEAD) /{_REPO}/resolve/(?P<revision>refs/pr/\d+|[^/]+)/(?P<path>.+)", _Handler.resolve),
)  # fmt: skip
