"""The Ray runtime: the simulator's engines in Ray actors."""
