"""A child of the supervisor that only tells when it starts and ends: `fake_child.py NAME MODE --settings JSON`.

Modes: run; stubborn (ignores SIGTERM and the end of stdin); exit-N and kill (at once); and for the web, which answers
every request with 200 while it runs.
"""

import http.server
import json
import os
import signal
import sys
import threading


def say(event: str) -> None:
    os.write(1, f"{name} {event} {os.getpid()}\n".encode())


def end(*_: object) -> None:
    say("ends")
    os._exit(0)


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
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
if name == "web":
    serve = json.loads(sys.argv[-1])["serve"]
    server = http.server.ThreadingHTTPServer((serve["host"], serve["port"]), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
if mode == "stubborn":
    threading.Event().wait(60)
end()
