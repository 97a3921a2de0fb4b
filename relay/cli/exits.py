"""What a command's exit code says, the same for all that talk to the API."""

from __future__ import annotations

from typing import Final

#: Done, and all is well.
OK: Final = 0
#: Refused, or it came to a bad end.
FAILED: Final = 1
#: The command line is wrong; click's own.
USAGE: Final = 2
#: No API answers, or what answers is none.
UNREACHABLE: Final = 3
#: Still under way when the time to wait was over.
UNFINISHED: Final = 4
#: Ended by Ctrl-C, as shells have it.
INTERRUPTED: Final = 130
