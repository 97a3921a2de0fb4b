"""The servers that `relay up` and the tests start for themselves: Postgres, Redis, and the processes beside them.

Standard library only, and ignorant of what the servers are used for.
"""
