"""What the server and a site wait for, in words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from piebald.federation.hub.member_list import Member
from piebald.federation.hub.server_state import FederationState
from piebald.federation.site.client_session import ClientSession

_NAMED = 5  # sites that one line names, at most


def server_waits_for(state: FederationState, gathered: bool) -> str:
    """What the server waits for, "" where its run has ended.

    Args:
        state: the server's state.
        gathered: whether the run has begun.
    """
    with state.lock:
        if state.closing:
            return ""
        if state.dismissed:
            return "the run is over: waiting until the sites know"
        missing = [member for member in state.members if not _ready(member, state)]
        working = [member for member in state.members if member.open]
        if not gathered:
            return f"waiting for {_listed([_presence(one) for one in missing])}" if missing else "waiting for sites"
        if working:
            return f"waiting for {_listed([_work(one, state.clock()) for one in working])}"
        if missing and len(missing) == len(state.members):
            return f"no site is present: waiting for {_listed([_presence(one) for one in missing])}"
        return f"the server is at work on step {state.version + 1}"


def site_waits_for(
    session: ClientSession, address: str, trouble: str, heard: float, at_work: Mapping[str, float]
) -> str:
    """What a site waits for, "" where its run has ended and nothing is left to do.

    Args:
        session: its part in the run.
        address: the server's, as HOST:PORT.
        trouble: why it is not connected, "" where it is.
        heard: when the server was heard last, in seconds since the epoch, 0 for never.
        at_work: what it is doing, and since when, in seconds since the epoch.
    """
    now = time.time()
    doing = [f"{what} for {now - since:.0f} s" for what, since in at_work.items()]
    last = f"last word {now - heard:.0f} s ago" if heard else "no word yet"
    welcome = session.welcome
    if trouble or not heard or now - heard > 15:
        waits = f"waiting for the server at {address} ({trouble or 'no answer'}; {last})"
    elif welcome is None or (not welcome.run and not welcome.over):
        waits = "connected: waiting for the server to begin a run"
    elif session.refused:
        waits = f"this site does not take part: {session.refused}"
    elif session.terms == welcome.terms and session.runner is None:
        waits = "an experiment waits for approval: piebald approve with the credentials of this site shows it"
    elif welcome.over:
        waits = "the run is over: waiting for another"
    else:
        waits = f"waiting for the server's next task ({last})"
    return ", ".join(doing) if doing and waits.startswith("waiting for the server's") else "; ".join([*doing, waits])


def _ready(member: Member, state: FederationState) -> bool:
    return member.ready(state.terms, state.timeouts.silence)


def _word(member: Member) -> str:
    return "not heard yet" if member.heard is None else f"last word {member.silent():.0f} s ago"


def _doing(member: Member) -> str:
    """What keeps a site from its tasks, to be followed by other words."""
    return f"{doing}, " if (doing := member.doing()) else ""


def _presence(member: Member) -> str:
    """A site that is missing, and why."""
    if member.hello is not None and member.hello.pending and not member.refused:
        return f"{member.name} (waits until somebody there approves the experiment, {_word(member)})"
    if member.refused:
        return f"{member.name} (refuses: {member.refused})"
    return f"{member.name} ({_doing(member)}{_word(member)})"


def _work(member: Member, now: float) -> str:
    """A site that has work, and which."""
    one = next(iter(member.open.values()))
    what = f"task {one.task.id} of" if one.trains else "an answer for"
    what += f" step {one.task.version + 1} for {now - one.sent:.0f} s"
    return f"{member.name} ({what}, {_doing(member)}{_word(member)})"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
