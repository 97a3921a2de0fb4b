"""Both servers together, for `relay up` and for tests: started side by side, stopped in any case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.embedded.home import Say, discard
from relay.embedded.postgres import PostgresServer
from relay.embedded.redis import RedisServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Servers:
    """The servers of one base directory, within a `with` block.

    Enter it on the main thread: only then do the servers end with a process that is killed. `discard` deletes the base
    directory afterwards, for tests. What is not wanted is None, and so is its URL.
    """

    def __init__(
        self,
        base: Path,
        *,
        want_postgres: bool = True,
        want_redis: bool = True,
        run_as: str | None = None,
        system: bool = True,
        wheel: bool = True,
        postgres_settings: Mapping[str, str] | None = None,
        discard: bool = False,
        say: Say = print,
    ) -> None:
        self._base = base
        self._discard = discard
        self.postgres: PostgresServer | None = None
        self.redis: RedisServer | None = None
        if want_postgres:
            self.postgres = PostgresServer(
                base, run_as, system=system, wheel=wheel, settings=postgres_settings, say=say
            )
        if want_redis:
            self.redis = RedisServer(base, run_as, system=system, wheel=wheel, say=say)

    @property
    def postgres_url(self) -> str | None:
        """Postgres's URL, None where it was not wanted."""
        return self.postgres.url if self.postgres else None

    @property
    def redis_url(self) -> str | None:
        """Redis's URL, None where it was not wanted."""
        return self.redis.url if self.redis else None

    def start(self) -> Servers:
        """Start what is wanted; stops it all again when one does not start."""
        wanted = [server for server in (self.redis, self.postgres) if server is not None]
        try:
            for server in wanted:
                server.begin()
            for server in wanted:
                server.await_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def revive(self) -> list[str]:
        """Start again what died, without waiting until it is ready; returns a sentence for each.

        URLs stay the same, unless another program took the port. Made to be called every second.
        """
        said = []
        for server in (self.redis, self.postgres):
            if server is not None and not server.alive():
                server.begin()
                said.append(f"{server.KIND} had died and was started again")
        return said

    def stop(self) -> None:
        """Stop what was started here; safe to call again."""
        try:
            if self.redis is not None:
                self.redis.stop()
        finally:
            try:
                if self.postgres is not None:
                    self.postgres.stop()
            finally:
                if self._discard:
                    discard(self._base)

    def __enter__(self) -> Servers:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
