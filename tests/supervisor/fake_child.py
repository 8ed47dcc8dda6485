"""A child of the supervisor that only tells when it starts and ends: `fake_child.py NAME MODE --settings JSON`.

Modes: run; stubborn (ignores SIGTERM and the end of stdin); exit-N and kill (at once). The web answers every request
with 200 once the engine is up.
"""

import http.server
import json
import os
import pathlib
import signal
import socket
import sys
import threading


def say(event: str) -> None:
    os.write(1, f"{name} {event} {os.getpid()}\n".encode())


def end(*_: object) -> None:
    say("ends")
    os._exit(0)


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if os.path.exists(settings["engine_socket"]) else 503)  # noqa: PTH110
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


name, mode = sys.argv[1:3]
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else end)
say("starts")
if mode.startswith("exit-"):
    os._exit(int(mode.removeprefix("exit-")))
if mode == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
settings = json.loads(pathlib.Path(sys.argv[-1].removeprefix("@")).read_text())
if name == "engine":
    with open(settings["socket_path"], "w"):  # noqa: PTH123 - an engine that is up has its socket
        pass
if name == "web":
    serve = settings["serve"]
    server = http.server.ThreadingHTTPServer((serve["host"], serve["port"]), Ready, bind_and_activate=False)
    server.socket = socket.socket(fileno=settings["listen_fd"])
    server.socket.setblocking(True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
if mode == "stubborn":
    threading.Event().wait(60)
end()
