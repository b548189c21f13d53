"""Pictures and pages for people: plain data in, drawings and self-contained HTML out.

The coordinator's report and a silo's report use it; it depends on neither.
"""
