"""Which parameters leave a client."""

from piebald.sharing.layers import AllBut, Everything, Nothing, OneHot, Only

__all__ = [
    "AllBut",
    "Everything",
    "Nothing",
    "OneHot",
    "Only",
]
