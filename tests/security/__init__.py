"""Attacks on promises: each test tries to break one, and would succeed if the promise were false."""
