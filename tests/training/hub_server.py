"""A Hub in memory, which the real client talks to through `HF_ENDPOINT`.

It has users with tokens that may read or write, public and private repositories with branches and tags, files in git
and in large-file storage, and it fails on demand. What a commit holds is seen whole or not at all, as on the real one.

    with HubServer({"hf_ann": ("ann", "write")}) as hub:
        hub.fail("PUT", "/lfs/", cut=True)   # the next upload breaks off half way
        ...                                  # a client with HF_ENDPOINT=hub.url
        hub.files("ann/model")
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 10 * 2**20  # bytes from which on a file lies in large-file storage, as those do that are not text


@dataclass
class Commit:
    """One state of a repository: path to content, and the paths that large-file storage holds."""

    files: dict[str, bytes]
    large: frozenset[str]
    message: str
    parent: str | None

    @property
    def oid(self) -> str:
        content = [sorted((path, hashlib.sha1(data).hexdigest()) for path, data in self.files.items())]
        return hashlib.sha1(json.dumps([content, self.message, self.parent]).encode()).hexdigest()

    def blob_id(self, path: str) -> str:
        """The hash by which a client knows that a file has not changed."""
        data = self.files[path]
        if path in self.large:
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add("main", Commit({}, frozenset(), "initial commit", None))

    def add(self, branch: str, commit: Commit) -> str:
        self.commits[commit.oid] = commit
        self.branches[branch] = commit.oid
        return commit.oid

    def find(self, revision: str) -> str | None:
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        return oid if oid in self.commits else None

    def history(self, revision: str) -> list[Commit]:
        """The commits that lead to `revision`, the newest first."""
        oid, found = self.find(revision), []
        while oid is not None:
            found.append(self.commits[oid])
            oid = self.commits[oid].parent
        return found


@dataclass
class Fault:
    """What happens to the next `times` requests of `method` whose path holds `path`."""

    method: str
    path: str
    times: int = 1
    cut: bool = False
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    damage: Callable[[bytes], bytes] | None = None


class HubError(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, message: str, code: str = "", **more: str):
        super().__init__(message)
        self.status, self.code, self.more = status, code, more


class HubServer:
    """Serves on a free local port while the context is open.

    Args:
        users: token to the user's name and "read" or "write".
    """

    def __init__(self, users: dict[str, tuple[str, str]]):
        self.users = users
        self.repositories: dict[str, Repository] = {}
        self.storage: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(HubHandler):
            def __init__(self, *args):
                self.hub = hub
                super().__init__(*args)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def reset(self) -> None:
        """Forget repositories, faults and requests."""
        for container in (self.repositories, self.storage, self.faults, self.requests):
            container.clear()

    def fail(self, method: str, path: str, **how) -> None:
        self.faults.append(Fault(method, path, **how))

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """What a visitor of the repository sees."""
        repository = self.repositories[name]
        return repository.commits[repository.find(revision)].files

    def messages(self, name: str, revision: str = "main") -> list[str]:
        """The messages of the commits, the newest first."""
        return [commit.message for commit in self.repositories[name].history(revision)]

    def count(self, method: str, path: str) -> int:
        return sum(one == method and path in other for one, other in self.requests)


NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/validate-yaml", "validate_card"),
    ("POST", r"/api/repos/create", "create"),
    ("GET", rf"/api/models/{NAME}(/revision/{REVISION})?", "info"),
    ("GET", rf"/api/models/{NAME}/tree/{REVISION}(/(?P<path>.+))?", "tree"),
    ("GET", rf"/api/models/{NAME}/refs", "refs"),
    ("GET", rf"/api/models/{NAME}/commits/{REVISION}", "commits"),
    ("POST", rf"/api/models/{NAME}/preupload/{REVISION}", "preupload"),
    ("POST", rf"/api/models/{NAME}/commit/{REVISION}", "commit"),
    ("POST", rf"/api/models/{NAME}/branch/{REVISION}", "branch"),
    ("POST", rf"/api/models/{NAME}/tag/{REVISION}", "tag"),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/(?P<oid>\w{64})", "store"),
    ("POST", r"/lfs/(?P<oid>\w{64})/verify", "verify"),
    ("GET", rf"/{NAME}/resolve/{REVISION}/(?P<path>.+)", "resolve"),
    ("HEAD", rf"/{NAME}/resolve/{REVISION}/(?P<path>.+)", "resolve"),
]


class HubHandler(BaseHTTPRequestHandler):
    """One request: a method for each route above gives what is answered."""

    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_GET(self) -> None:
        self.serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def serve(self) -> None:
        self.path, self.query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        self.hub.requests.append((self.command, self.path))
        fault = next((one for one in self.hub.faults if one.method == self.command and one.path in self.path), None)
        if fault:
            fault.times -= 1
            if not fault.times:
                self.hub.faults.remove(fault)
        if fault and fault.cut and self.command in ("PUT", "POST"):
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self.close_connection = True
            return
        self.body = self.read_body()
        try:
            if fault and fault.status:
                self.answer(b"{}", fault.status, fault.headers)
                return
            data, headers = self.route()
            if fault and fault.damage:
                data = fault.damage(data)
            self.answer(data, 206 if "Content-Range" in headers else 200, headers, cut=bool(fault and fault.cut))
        except HubError as error:
            headers = {"X-Error-Message": str(error)} | ({"X-Error-Code": error.code} if error.code else {})
            self.answer(json.dumps({"error": str(error), **error.more}).encode(), error.status, headers)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def route(self) -> tuple[bytes, dict[str, str]]:
        for method, pattern, name in ROUTES:
            if method == self.command and (match := re.fullmatch(pattern, self.path)):
                parts = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                found = getattr(self, name)(**parts)
                if isinstance(found, tuple):
                    return found
                return json.dumps(found).encode(), {"Content-Type": "application/json"}
        raise HubError(404, f"there is no {self.command} {self.path}")

    def answer(self, data: bytes, status: int, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if cut:
            data = data[: len(data) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(data)

    # Who may do what

    def user(self, must_write: bool = False) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            raise HubError(401, "Invalid credentials in Authorization header")
        name, role = self.hub.users.get(token, (None, "read"))
        if must_write and name is None:
            raise HubError(401, "Invalid username or password.")
        if must_write and role != "write":
            raise HubError(403, "the token has no right to write")
        return name

    def repository(self, name: str, must_write: bool = False) -> Repository:
        user = self.user()
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and user != name.split("/")[0]):
            raise HubError(401 if user is None else 404, "Repository not found", "RepoNotFound")
        if must_write and self.user(must_write) != name.split("/")[0]:
            raise HubError(403, "You don't have the rights to write to this repository")
        return repository

    def at(self, repository: Repository, revision: str) -> tuple[str, Commit]:
        oid = repository.find(revision)
        if oid is None:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid, repository.commits[oid]

    def json(self) -> dict:
        return json.loads(self.body or b"{}")

    # Routes

    def whoami(self) -> dict:
        name = self.user()
        if name is None:
            raise HubError(401, "Invalid username or password.")
        return {"type": "user", "name": name, "orgs": [], "auth": {"accessToken": {"role": "write"}}}

    def validate_card(self) -> dict:
        return {"errors": [], "warnings": []}

    def create(self) -> dict:
        request, user = self.json(), self.user(must_write=True)
        owner = request.get("organization") or user
        if owner != user:
            raise HubError(403, f"You don't have the rights to create a model under the namespace {owner}")
        name = f"{owner}/{request['name']}"
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repositories:
            raise HubError(409, "You already created this model repo", url=url)
        is_private = request.get("private") or request.get("visibility") == "private"
        self.hub.repositories[name] = Repository(bool(is_private))
        return {"url": url, "name": name, "id": name}

    def info(self, name: str, revision: str = "main") -> dict:
        repository = self.repository(name)
        oid, commit = self.at(repository, revision)
        siblings = [{"rfilename": path} for path in commit.files]
        return {
            "id": name,
            "modelId": name,
            "sha": oid,
            "private": repository.private,
            "siblings": siblings,
            "tags": [],
        }

    def tree(self, name: str, revision: str, path: str = "") -> list:
        _, commit = self.at(self.repository(name), revision)
        entries = []
        for file, data in sorted(commit.files.items()):
            if not file.startswith(path):
                continue
            entry = {"type": "file", "path": file, "size": len(data), "oid": commit.blob_id(file)}
            if file in commit.large:
                entry["lfs"] = {"oid": commit.blob_id(file), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        return entries

    def refs(self, name: str) -> dict:
        repository = self.repository(name)
        kinds = {"branches": ("heads", repository.branches), "tags": ("tags", repository.tags)}
        listed = {
            kind: [{"name": ref, "ref": f"refs/{folder}/{ref}", "targetCommit": oid} for ref, oid in refs.items()]
            for kind, (folder, refs) in kinds.items()
        }
        return {**listed, "converts": []}

    def commits(self, name: str, revision: str) -> list:
        repository = self.repository(name)
        self.at(repository, revision)
        return [
            {"id": one.oid, "title": one.message, "message": "", "authors": [], "date": "2026-01-01T00:00:00.000Z"}
            for one in repository.history(revision)
        ]

    def preupload(self, name: str, revision: str) -> dict:
        _, commit = self.at(self.repository(name, must_write=True), revision)
        answers = []
        for file in self.json()["files"]:
            is_large = file["size"] > LARGE or not _is_text(base64.b64decode(file["sample"]))
            oid = commit.blob_id(file["path"]) if file["path"] in commit.files else None
            mode = "lfs" if is_large else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def batch(self, name: str) -> dict:
        self.repository(name, must_write=True)
        objects = []
        for wanted in self.json()["objects"]:
            found = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.storage:
                href = f"{self.hub.url}/lfs/{wanted['oid']}"
                found["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            objects.append(found)
        return {"transfer": "basic", "objects": objects}

    def store(self, oid: str) -> dict:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, f"the content is not that of {oid}")
        self.hub.storage[oid] = self.body
        return {}

    def verify(self, oid: str) -> dict:
        if oid not in self.hub.storage:
            raise HubError(404, f"{oid} has not been uploaded")
        return {}

    def commit(self, name: str, revision: str) -> dict:
        repository = self.repository(name, must_write=True)
        parent, before = self.at(repository, revision)
        files, large, message = dict(before.files), set(before.large), ""
        for line in self.body.splitlines():
            key, value = json.loads(line).values()
            path = value.get("path")
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[path] = base64.b64decode(value["content"])
                large.discard(path)
            elif key == "lfsFile":
                if value["oid"] not in self.hub.storage:
                    raise HubError(400, f"{path}: its content has not been uploaded")
                files[path] = self.hub.storage[value["oid"]]
                large.add(path)
            elif key == "deletedFile":
                del files[path]
                large.discard(path)
            else:
                raise HubError(400, f"unknown operation {key}")
        oid = repository.add(revision, Commit(files, frozenset(large), message, parent))
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None}

    def branch(self, name: str, revision: str) -> dict:
        repository = self.repository(name, must_write=True)
        if revision in repository.branches:
            raise HubError(409, f"Reference already exists: {revision}")
        repository.branches[revision], _ = self.at(repository, self.json().get("startingPoint", "main"))
        return {}

    def tag(self, name: str, revision: str) -> dict:
        repository = self.repository(name, must_write=True)
        repository.tags[self.json()["tag"]], _ = self.at(repository, revision)
        return {}

    def resolve(self, name: str, revision: str, path: str) -> tuple[bytes, dict[str, str]]:
        oid, commit = self.at(self.repository(name), revision)
        if path not in commit.files:
            raise HubError(404, "Entry not found", "EntryNotFound")
        data = commit.files[path]
        headers = {"X-Repo-Commit": oid, "ETag": f'"{commit.blob_id(path)}"', "Accept-Ranges": "bytes"}
        if path in commit.large:
            headers |= {"X-Linked-Etag": f'"{commit.blob_id(path)}"', "X-Linked-Size": str(len(data))}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(match[1]), int(match[2] or len(data) - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data = data[start:stop]
        return data, headers


def _is_text(sample: bytes) -> bool:
    try:
        sample.decode()
    except UnicodeDecodeError as error:
        return error.start > len(sample) - 4  # the sample ends within a character
    return b"\0" not in sample
