"""A local server with as much of the hub's protocol as a client needs to fetch files. It can misbehave.

As on the hub, `resolve` answers with the file's commit, size and SHA-256 and sends the client to another host
for the bytes, which honours Range. It offers no Xet store, so that the client uses plain HTTP.
"""
import hashlib
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves `files` (name -> bytes) until the end of the `with` block.

    `faults` (name -> list) are used up one a request of a file's bytes: "cut" ends the connection at half,
    ("cut", n) after n bytes, "short" leaves out the end, "flip" changes one byte, "hang" never
    answers, "slow" sends a tenth at a time, "loop" redirects to itself; a status, or (status, headers), is
    the answer. `head_faults` takes statuses for metadata. `sha256` False publishes no SHA-256, `sizes` other
    sizes than the true ones, `commit` another commit. `requests` records (method, name, Range or None).
    """
    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.delay = files, 0.0          # seconds before bytes are sent
        self.faults: dict[str, list] = {}
        self.head_faults: dict[str, list] = {}
        self.commit = COMMIT
        self.sizes: dict[str, int] = {}
        self.sha256 = True
        self.requests: list[tuple[str, str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.store = f"http://localhost:{self.server_port}/store"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, args=[0.02], daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address) -> None:
        """Clients go away in some tests. A traceback of that would show up in another test's output."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def fetched(self) -> list[str]:
        """Names of the files whose bytes were asked for, sorted."""
        return sorted(name for method, name, _ in self.requests if method == "GET")


class Handler(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def refuse(self, fault: int | tuple[int, dict[str, str]]) -> None:
        status, headers = fault if isinstance(fault, tuple) else (fault, {})
        self.answer(status, {"Content-Length": "0"} | headers)

    def do_HEAD(self) -> None:
        hub, name = self.server, self.path.rsplit("/", 1)[1]
        hub.requests.append(("HEAD", name, None))
        if hub.head_faults.get(name):
            return self.refuse(hub.head_faults[name].pop(0))
        content = hub.files.get(name)
        if content is None or "/datasets/kjj0/fineweb10B-gpt2/resolve/" not in self.path:
            return self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT,
                                     "Content-Length": "0"})
        digest = hashlib.sha256(content).hexdigest() if hub.sha256 else hashlib.sha1(content).hexdigest()
        self.answer(302, {"X-Repo-Commit": hub.commit,
                          "X-Linked-Size": str(hub.sizes.get(name, len(content))),
                          "X-Linked-Etag": f'"{digest}"', "Location": f"{hub.store}/{name}",
                          "Content-Length": "0"})

    def do_GET(self) -> None:
        hub, name = self.server, self.path.rsplit("/", 1)[1]
        # The client asks for other things too, and lives without them.
        if not self.path.startswith("/store/"):
            return self.answer(404, {"Content-Length": "0"})
        hub.requests.append(("GET", name, self.headers.get("Range")))
        time.sleep(hub.delay)
        content, fault = hub.files[name], (hub.faults.get(name) or [None]).pop(0)
        end = len(content) // 2 if fault == "cut" else None
        if isinstance(fault, tuple) and fault[0] == "cut":
            end = fault[1]
        elif isinstance(fault, (int, tuple)):
            return self.refuse(fault)
        if fault == "loop":
            hub.faults[name] = ["loop"]
            return self.refuse((302, {"Location": f"{hub.store}/{name}"}))
        if fault == "hang":
            time.sleep(60)
        if fault == "short":
            content = content[:-1000]
        if fault == "flip":
            middle = len(content) // 2 & ~1  # the low byte of an id
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:]
        wanted = self.headers.get("Range", "bytes=0-")
        start = int(wanted.removeprefix("bytes=").split("-")[0])
        headers = {"Content-Length": str(len(content) - start), "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.answer(206 if start else 200, headers)
        piece = len(content) // 10 if fault == "slow" else len(content)
        for at in range(start, len(content[:end]), piece):
            self.wfile.write(content[at:at + piece][:None if end is None else end - at])
            time.sleep(0.02 * (fault == "slow"))
