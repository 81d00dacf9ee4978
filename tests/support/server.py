"""A web server on this machine that gives out the files of a folder."""

import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Server(http.server.ThreadingHTTPServer):
    """Server that records its requests, and hangs up some times in the middle of a file."""

    hangs_up = 0

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=folder))

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        super().do_GET()

    def copyfile(self, source, outputfile) -> None:
        if self.server.hangs_up > 0:
            self.server.hangs_up -= 1
            outputfile.write(source.read()[:-1])
        else:
            super().copyfile(source, outputfile)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
