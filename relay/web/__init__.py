"""The HTTP API: read the request, call the store, render the answer."""
