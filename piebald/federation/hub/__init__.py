"""The server of a federation: its settings, its runtime, its members and messages, and the terms of a run.

Results of sites are checked here against the form that their tasks allow.  Rows and policies of sites are not known
here.
"""
