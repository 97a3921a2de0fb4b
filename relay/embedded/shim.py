"""Stands between a parent and the program it starts: drops root, ties the child's life to the parent's, then execs.

Run as a script by the parent's own interpreter, before any user is switched: that interpreter may live where the other
user cannot read. The death signal is set after the switch, because the kernel forgets it when credentials change.
It follows the *thread* that started the child, so only the main thread may ask for it.

Arguments: parent's pid, death signal (0 for none), uid, gid (-1 to keep both), then the program and its arguments.
Linux only for the death signal; elsewhere it is left out, and a child can outlive a parent that was killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_NO_PARENT = 120
EXIT_NOT_STARTED = 121


def main(argv: list[str]) -> None:
    """Become the program; returns never."""
    parent, death_signal, uid, gid = map(int, argv[:4])
    command = argv[4:]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a stop this early ends it without a traceback
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and the program would inherit that
        signal.signal(ignored, signal.SIG_DFL)
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
        os.umask(0o077)
    if death_signal and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(EXIT_NO_PARENT)
    try:
        os.execvp(command[0], command)  # noqa: S606 - its purpose
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(EXIT_NOT_STARTED)


if __name__ == "__main__":
    main(sys.argv[1:])
