"""How a stack of clients is trained and scored; no recipe knows which engine runs it."""
