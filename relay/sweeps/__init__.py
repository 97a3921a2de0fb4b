"""Housekeeping: one sweep a module, each `run_once() -> counts`, none aware of Celery."""
