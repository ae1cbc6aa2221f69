"""The noise that protects, under the name by which those who care for privacy look for it."""

from piebald.noise import GRID, KEY, NoiseSource, grid_of

__all__ = ["GRID", "KEY", "NoiseSource", "grid_of"]
