"""A webhook receiver to test against: it verifies, remembers and, when asked, misbehaves down to the byte.

It stands alone (standard library and `relay.core.errors` only) so that what it says about
Relay's signatures and requests is not computed by the code that made them.
"""
