"""The work that a silo does for a message.

``train``, ``evaluate`` and ``discriminate`` answer messages; the other modules provide the
message itself (``request``), the silo's task and data (``session``), and the numerics.
"""
