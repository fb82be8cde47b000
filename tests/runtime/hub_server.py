"""A Hugging Face hub with one model repository in a folder: what `huggingface_hub` asks of the real one, over HTTP.

Large files take the way of Git LFS, as there. Requests without the token get the status 401.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

REPOSITORY, TOKEN = "ada/moon", "hf_secret"


class Handler(BaseHTTPRequestHandler):
    root: Path
    commits: int

    def do_POST(self) -> None:
        data = self.sent()
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "no token"})
        if self.path == f"/api/models/{REPOSITORY}/commit/main":
            return self.commit([json.loads(line) for line in data.splitlines()])
        said = json.loads(data)
        if self.path == "/api/repos/create":
            is_new = not self.root.exists()
            self.root.mkdir(exist_ok=True)
            return self.answer(200 if is_new else 409, {"url": f"{self.url}/{REPOSITORY}"})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {})
        if self.path == f"/api/models/{REPOSITORY}/preupload/main":
            kinds = [{"path": f["path"], "uploadMode": mode_of(f), "shouldIgnore": False} for f in said["files"]]
            return self.answer(200, {"files": kinds})
        if self.path == f"/{REPOSITORY}.git/info/lfs/objects/batch":
            to = {one["oid"]: {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}} for one in said["objects"]}
            objects = [one | {"actions": to[one["oid"]]} for one in said["objects"]]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        return self.answer(404, {"error": self.path})

    def do_PUT(self) -> None:
        data = self.sent()
        assert self.path == f"/lfs/{sha256(data).hexdigest()}"
        (self.root.parent / sha256(data).hexdigest()).write_bytes(data)
        self.answer(200, {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path.startswith(f"/api/models/{REPOSITORY}/tree/main"):
            files = [path for path in self.root.rglob("*") if path.is_file()]
            return self.answer(200, [entry_of(path, self.root) for path in files])
        file = self.root / self.path.removeprefix(f"/{REPOSITORY}/resolve/main/")
        if not file.is_file():
            return self.answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        data = file.read_bytes()
        return self.answer(
            200, data, {"ETag": f'"{sha256(data).hexdigest()}"', "X-Repo-Commit": f"{self.commits:040}"}
        )

    def commit(self, lines: list[dict]) -> None:
        for line in lines:
            said, path = line["value"], self.root / line["value"].get("path", "")
            path.parent.mkdir(parents=True, exist_ok=True)
            match line["key"]:
                case "file":
                    path.write_bytes(b64decode(said["content"]))
                case "lfsFile":
                    (self.root.parent / said["oid"]).rename(path)
                case "deletedFile":
                    path.unlink()
        type(self).commits += 1
        told = f"{self.commits:040}"
        self.answer(
            200, {"commitUrl": f"{self.url}/{REPOSITORY}/commit/{told}", "commitOid": told, "hookOutput": ""}
        )

    def sent(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        data = b""
        while size := int(self.rfile.readline(), 16):  # chunked
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    @property
    def url(self) -> str:
        return f"http://{self.headers['Host']}"

    def answer(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        for name, value in ({"Content-Length": str(len(data)), "Content-Type": kind} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *said: object) -> None:
        pass


def mode_of(file: dict) -> str:
    return "lfs" if file["size"] > 10_000 or file["path"].endswith(".safetensors") else "regular"


def entry_of(path: Path, root: Path) -> dict[str, object]:
    return {"type": "file", "path": str(path.relative_to(root)), "size": path.stat().st_size, "oid": "0" * 40}


@contextmanager
def hub_server(root: Path) -> Iterator[str]:
    """Address of a hub whose repository is the folder `root`, which need not exist."""
    handler = type("OwnHandler", (Handler,), {"root": root, "commits": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
