"""Flower with less: what only shows, and all of it behind the login.

Flower's /metrics and /healthcheck ask for no login, and its API starts tasks and ends workers for whoever has one. None
of that is for a console that people look at: those routes are taken out of its table before it starts, and are 404.

    python -m relay.tasks.console -A relay.tasks.inspected flower
"""

from __future__ import annotations

from typing import Any, Final

from celery.__main__ import main
from flower import urls

#: Modules of Flower all of whose routes go: what controls workers, and what answers without a login.
_CLOSED: Final = ("flower.api.control", "flower.views.monitor")
#: Of this one those that do something: they take POST.
_TASKS: Final = "flower.api.tasks"


def is_open(handler: type[Any]) -> bool:
    """Say whether a route's handler only shows, to who is logged in."""
    module = handler.__module__
    return module not in _CLOSED and not (module == _TASKS and "post" in vars(handler))


def close_routes() -> None:
    """Take the others out of Flower's table. In place: Flower has it by reference."""
    urls.handlers[:] = [one for one in urls.handlers if is_open(one.handler_class if hasattr(one, "regex") else one[1])]


if __name__ == "__main__":
    close_routes()
    main()
