"""The simulator: clients as data, and a virtual clock."""
