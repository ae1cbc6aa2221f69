"""Which parameters leave a client."""

from piebald.sharing.layers import AllExcept, Full, Nothing, OneHot, Only

__all__ = [
    "AllExcept",
    "Full",
    "Nothing",
    "OneHot",
    "Only",
]
