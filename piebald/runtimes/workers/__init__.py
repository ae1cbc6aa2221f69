"""Worker processes: who trains the stacks of clients."""
