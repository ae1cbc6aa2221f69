"""A site: its process, rows, policy, consent and limits, and its part in a run.

Nothing of the server is known here but its messages.
"""
