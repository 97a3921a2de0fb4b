"""The end of a listening socket: who is connecting just then is neither reset nor left unanswered.

Closing a listener resets what has connected and was not accepted yet, and there is no telling that nobody is about to.
So newcomers are kept away first, by a filter on their first segment; who has sent it already arrives and is accepted;
and then the listener closes. A newcomer's system sends that segment again after a second, and meets whoever listens by
then, or a refusal. That holds for whoever ends alone among processes that share a port, too: its newcomers wait that
second, though another could take them.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from typing import Final

#: Seconds that a handshake may take that had begun: nearly always with a proxy nearby. A longer one is reset.
ARRIVAL_SECS: Final = 0.05

# asm-generic/socket.h; a few processors that Linux runs on have another number, and refuse this one.
_SO_ATTACH_FILTER: Final = 26
# linux/filter.h (socket(7)): code, jump if true, jump if false, value. A listener's filter sees segments from their TCP
# header on, whose byte 13 holds the flags (RFC 9293 section 3.1): SYN is 2, ACK 16.
_DROP_SYN: Final = (
    (0x30, 0, 0, 13),  # load that byte
    (0x54, 0, 0, 0x12),  # keep SYN and ACK of it
    (0x15, 0, 1, 0x02),  # SYN alone?
    (0x06, 0, 0, 0),  # then let nothing through
    (0x06, 0, 0, 0xFFFF_FFFF),  # else all of it
)


def keep_new_away(listener: socket.socket) -> bool:
    """Have the system ignore whoever begins to connect from now on; False where it knows no such thing."""
    if not sys.platform.startswith("linux"):
        return False
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in _DROP_SYN))
    try:
        # The system copies the program.
        listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(_DROP_SYN), ctypes.addressof(program))
        )
    except OSError:
        return False
    return True
