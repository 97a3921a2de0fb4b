"""Celery, thin: the app, the step that feeds it from the stream, and one task for each sweep."""
