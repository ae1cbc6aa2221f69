"""Other systems on the same links."""
