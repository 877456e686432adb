"""``python`` for commands: hands its arguments to the warm server, and is to the outside the process that runs them.

Called by a shell script of that name with the interpreter, the server's socket and the path of the script before the
arguments. Uses the standard library alone, without site-packages, so that it starts in milliseconds.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    interpreter, path, executable, *arguments = sys.argv[1:]
    while arguments and arguments[0] == "-u":
        del arguments[0]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
        os.execv(interpreter, [interpreter, *arguments])  # interactive, say
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    for number in FORWARDED:
        signal.signal(number, lambda received, _frame: server.sendall(bytes([received])))
    message = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "executable": executable,
        "folder": os.getcwd(),
    }
    data = json.dumps(message).encode() + b"\n"
    sent = socket.send_fds(server, [data], [0, 1, 2])
    server.sendall(data[sent:])
    status = int(server.recv(16) or 1)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
