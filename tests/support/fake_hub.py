"""A small stand-in for the Hugging Face Hub on loopback: makes repositories and takes uploaded files."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class FakeHub:
    """What was asked of it: repositories by name with whether they are private, and files by repository and path."""

    address: str = ""
    token: str = "hf_test"
    repositories: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    """Uploaded large files by their SHA-256."""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run the stand-in on a free port."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        """Answers the requests of `create_repo` and `upload_folder`."""

        def log_message(self, *parts: Any) -> None:
            """Print nothing."""

        def answer(self, value: Any, status: int = 200) -> None:
            """Send a JSON answer."""
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def body(self) -> bytes:
            """Return the body of the request."""
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def do_POST(self) -> None:
            """Make a repository, say how files are uploaded, or commit."""
            content = self.body()
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer({"error": "Invalid user token."}, 401)
            elif self.path == "/api/repos/create":
                self.create(json.loads(content))
            elif self.path == "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                files = json.loads(content)["files"]
                modes = [{"path": file["path"], "uploadMode": mode_of(file), "shouldIgnore": False} for file in files]
                self.answer({"files": modes})
            elif self.path.endswith("/info/lfs/objects/batch"):
                objects = json.loads(content)["objects"]
                for item in objects:
                    item["actions"] = {"upload": {"href": f"{hub.address}/upload/{item['oid']}"}}
                self.answer({"objects": objects, "transfer": "basic"})
            elif "/commit/" in self.path:
                self.commit(content)
            else:
                self.answer({"error": self.path}, 404)

        def create(self, wanted: dict[str, Any]) -> None:
            """Make a repository; one that is there is a conflict, as on the Hub."""
            name = "/".join(filter(None, [wanted.get("organization"), wanted["name"]]))
            known = name in hub.repositories
            hub.repositories.setdefault(name, wanted.get("private") or wanted.get("visibility") == "private")
            self.answer({"url": f"{hub.address}/{name}", "name": name}, 409 if known else 200)

        def commit(self, content: bytes) -> None:
            """Take the files of a commit: small ones in the request, large ones that were uploaded before."""
            repository = "/".join(self.path.split("/")[3:5])
            files = hub.files.setdefault(repository, {})
            for line in content.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = hub.large[value["oid"]]
            self.answer({"commitUrl": f"{hub.address}/{repository}/commit/1", "commitOid": "1" * 40, "success": True})

        def do_PUT(self) -> None:
            """Take a large file and check its digest."""
            content = self.body()
            digest = hashlib.sha256(content).hexdigest()
            if not self.path.endswith(digest):
                self.answer({"error": "digest"}, 400)
                return
            hub.large[digest] = content
            self.answer({})

        def do_GET(self) -> None:
            """Describe a repository."""
            self.answer({"id": "/".join(self.path.split("/")[3:5]), "siblings": [], "private": True})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def mode_of(file: dict[str, Any]) -> str:
    """Return how a file is uploaded: weights as large files, the rest in the commit."""
    return "lfs" if file["path"].endswith((".safetensors", ".onnx")) else "regular"
