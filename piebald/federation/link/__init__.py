"""Messages between a server and its sites: connections, frames, pieces, and the fields of messages.

Credentials say who is at the other end of a connection.  Nothing here knows what a task or a policy is.
"""
