"""The server of a federation: its settings, its runtime, its members and messages, and the terms of a run.

Rows and policies of sites are not known here.
"""
