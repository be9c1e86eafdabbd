"""What ``horovodrun`` runs in place of a worker: see ``zygote.py``. Standard library only, started without site."""

import json
import os
import signal
import socket
import sys


def main() -> None:
    path, module, *arguments = sys.argv[1:]
    order = {"module": module, "arguments": arguments, "environ": dict(os.environ), "cwd": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(order).encode()], [0, 1, 2])
        answers = connection.makefile()
        pid = int(answers.readline())
        signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
        code = int(answers.readline() or -signal.SIGKILL)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
