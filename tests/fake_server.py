"""A server in this process that answers chat completions as a test scripts them: for what a real one does not do on demand."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RESET = "reset"


@dataclass
class Reply:
    """One answer. `body` is sent as JSON, or as it is if it is bytes; `RESET` breaks the connection."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0


def completion(content: str | None, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": content, **message}}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    return {"object": "chat.completion", "model": "tiny", "choices": [choice], "usage": usage}


def echo(body: dict[str, Any], _number: int) -> Reply:
    """An answer that tells which conversation it is for."""
    return Reply(body=completion(f"to {body['messages'][-1]['content']}"))


Script = Callable[[dict[str, Any], int], Reply | str]


class FakeServer:
    """`asked` are the bodies of all chat completions in the order of their arrival, `most` the most at once."""

    def __init__(self, script: Script, models: list[str]) -> None:
        self.script, self.models = script, models
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.release = threading.Event()  # answers that wait are sent now
        self.url = ""

    def contents(self) -> list[str]:
        """The last message of each request."""
        return [body["messages"][-1]["content"] for body in self.asked]


@contextmanager
def fake_server(script: Script = echo, models: tuple[str, ...] = ("tiny",)) -> Iterator[FakeServer]:
    state = FakeServer(script, list(models))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            state.headers.append(dict(self.headers))
            self._send(Reply(body={"object": "list", "data": [{"id": name, "owned_by": "test"} for name in state.models]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.asked.append(body)
                state.headers.append(dict(self.headers))
                number = len(state.asked) - 1
                state.now += 1
                state.most = max(state.most, state.now)
            try:
                self._send(state.script(body, number))
            finally:
                with state.lock:
                    state.now -= 1

        def _send(self, reply: Reply | str) -> None:
            if isinstance(reply, str):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                return
            state.release.wait(reply.wait_s)
            data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            try:
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(data)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # the other side has gone
                pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

        def handle_error(self, *_: object) -> None:  # a broken connection is what the test asked for
            pass

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="fake server")
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        state.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
