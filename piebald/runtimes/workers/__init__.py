"""Worker processes that train stacks of clients, and the store of client state."""
