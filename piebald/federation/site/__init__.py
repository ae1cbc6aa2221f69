"""A site: its process, rows, policy, consent and limits, and its part in a run.

Whatever comes from a server is checked here against the policy before rows are touched, and before anything leaves.
Nothing of the server is known here but its messages and the terms of a run.
"""
