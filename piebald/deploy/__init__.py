"""A site's side of a real federation: its settings, its rows, and a run's terms made into work."""
