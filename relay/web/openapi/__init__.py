"""The API's description in OpenAPI 3.1, made of the app that is served.

Paths, methods, scopes and words come from the routes themselves, bodies from the models that judge them, answers from
the types that the views make. What code does not say (parameters, statuses and the codes of problems) is in the tables
here, one entry a route; a route without one, or an entry without a route, fails.
"""
