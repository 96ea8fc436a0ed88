"""`make reliability`: every promise of docs/reliability.md checked at full count, each beside a broken variant.

Checks are independent: each runs in a process of its own and leaves one JSON file; the page is drawn from those files.
"""
