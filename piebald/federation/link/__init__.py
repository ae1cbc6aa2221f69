"""Messages between a server and its sites: connections, frames, pieces, and what messages are made of.

Nothing here knows what a task or a policy is.
"""
