"""A model hub on this machine: one repository, served as huggingface_hub 1.33 asks for it, with faults on demand."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "owner/name"
TOKEN = "hf_right"


@dataclass
class Hub:
    """What the server has, which faults it makes, and what it was asked.

    Attributes:
        folder: the repository's files; those that end in .safetensors or .parquet are stored with LFS.
        commit: what main is.
        gated: files are for TOKEN alone, as on the real hub the listing is for everybody.
        cut_at: the byte at which an answer that carries a file breaks off, as often as cuts says.
        flipped: the file of which one byte arrives changed.
        moved: name that the repository had before, from which the server leads to the present one.
        requests: method, path and Range of all requests.
    """

    folder: Path
    commit: str = COMMIT
    gated: bool = False
    cut_at: int = 0
    cuts: int = 0
    flipped: str = ""
    moved: str = ""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    endpoint: str = ""

    def fetched(self) -> list[tuple[str, str | None]]:
        """Name and Range of every file asked for."""
        return [(path.rpartition("/")[2], span) for _, path, span in self.requests if "/resolve/" in path]

    def listing(self) -> dict[str, object]:
        siblings = []
        for file in sorted(self.folder.rglob("*")):
            if not file.is_file():
                continue
            content = file.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            name = file.relative_to(self.folder).as_posix()
            entry = {"rfilename": name, "size": len(content), "blobId": blob}
            if file.suffix in (".safetensors", ".parquet"):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 130}
            siblings.append(entry)
        return {"id": REPOSITORY, "modelId": REPOSITORY, "sha": self.commit, "siblings": siblings}


def running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one repository, which the hub's client of this process may ask, without a token."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder.parent / "no token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub = Hub(folder)
    server = _start(hub)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    yield hub
    server.shutdown()
    server.server_close()
    huggingface_hub.close_session()


def _start(hub: Hub) -> ThreadingHTTPServer:
    """Serve hub on a free port, and write its address into it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = (
            -1
        )  # head and body in one packet: the second of two waits 40 ms for the first to be acknowledged

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            hub.requests.append((self.command, path, self.headers.get("Range")))
            if hub.moved and f"/{hub.moved}" in path:
                # As the real hub: a renamed repository is found by its former name, by a relative redirect.
                place = path.replace(f"/{hub.moved}", f"/{REPOSITORY}") + (f"?{query}" if query else "")
                self._answer(307, b"", {"Location": place})
                return
            path = path.removeprefix("/datasets")  # a dataset's files; a model's lie at the root
            if match := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                if self._exists(match[1], match[2] or "main"):
                    assert "blobs=" in query
                    self._answer(200, json.dumps(hub.listing()).encode())
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                if self._exists(match[1], match[2]):
                    self._file(match[3])
            else:
                self._refuse(404, "EntryNotFound")

        def _exists(self, repository: str, revision: str) -> bool:
            if repository != REPOSITORY:
                # As the real hub: whoever is not logged in cannot tell a private repository from none.
                self._refuse(401, "RepoNotFound")
            elif revision not in ("main", hub.commit):
                self._refuse(404, "RevisionNotFound")
            else:
                return True
            return False

        def _file(self, name: str) -> None:
            if hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._refuse(403, "GatedRepo")
                return
            content = (hub.folder / name).read_bytes()
            if name == hub.flipped:
                content = content[:-1] + bytes([content[-1] ^ 1])
            span, total = self.headers.get("Range"), len(content)
            begin = int(span.removeprefix("bytes=").removesuffix("-")) if span else 0
            tag = hashlib.sha1(content).hexdigest()
            headers = {"ETag": f'"{tag}"', "X-Repo-Commit": hub.commit, "Accept-Ranges": "bytes"}
            if span:
                headers["Content-Range"] = f"bytes {begin}-{total - 1}/{total}"
            cut = hub.cut_at if begin < hub.cut_at < total and hub.cuts else None
            hub.cuts -= cut is not None
            self._answer(206 if span else 200, content[begin:], headers, None if cut is None else cut - begin)

        def _refuse(self, status: int, code: str) -> None:
            self._answer(status, b"{}", {"X-Error-Code": code})

        def _answer(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:cut])
            self.close_connection = cut is not None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server
