"""The operation of a federation: status, page, metrics, logs, checks of machines, and the queue of experiments.

All of it reads files that servers and sites write, so that it can neither slow nor stop a run.  Nothing here sends a
message to a party.
"""
