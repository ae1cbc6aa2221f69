"""Checks of a site: what its start looks at, and what it can ask the server without taking part."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch

from piebald.contracts import Clients
from piebald.core import pytree
from piebald.core.errors import PiebaldError, SettingError
from piebald.federation.hub.run_terms import read_values
from piebald.federation.link.messaging import SERVER, Link
from piebald.federation.link.tls import proxy_for
from piebald.federation.link.wire_format import PROTOCOL, SAME_PROTOCOL, CheckReply, Refused, decode, digest, release
from piebald.federation.operate.machine_checks import SPACE, Check, check_certificate, check_space
from piebald.federation.site.consent import Consent
from piebald.federation.site.gate import Connected, Outlet
from piebald.federation.site.site_process import SiteWork
from piebald.federation.site.site_rows import SPLITS, SiteClient, missing_source, row_ledger, rows_before_a_run

CLOCK = 60.0  # seconds that the clocks of server and site may differ
DELTA = 1e-6  # at which the loss of privacy is told
_PATIENCE = 15.0  # seconds to wait for the server
_COPIES = 10  # vectors of the model's size on a site's disk, at most


def site_machine(work: SiteWork) -> list[Check]:
    """Check what a site needs before it connects: credentials, certificate, device, disk and rows."""
    credentials = work.credentials
    party = Check("credentials", True, f"{credentials.party} of {credentials.federation}")
    if credentials.party == SERVER:
        party = Check("credentials", False, "they are the server's: a site needs credentials of its own")
    checks = [party, check_certificate(credentials.folder), Check("device", True, work.settings.device)]
    return [*checks, *_proxy(work), check_space(credentials.folder), _rows(work)]


def check_site(
    work: SiteWork, patience: float = _PATIENCE, met: Callable[[SiteClient], None] = lambda _: None
) -> list[Check]:
    """All that can be known about a site before it takes part, the server's run included.

    The server is told that somebody looked, and nothing else: the site does not count as present.

    Args:
        work: the site.
        patience: seconds to wait for the server.
        met: called with the run as it is at this site, if the site meets its terms.
    """
    checks = site_machine(work)
    if checks[0].fine is False:
        return checks
    return [*checks[:-1], *_checked_with_server(work, checks[-1], patience, met), *_questions(work, checks[-1])]


def _proxy(work: SiteWork) -> list[Check]:
    """The proxy through which the server is reached, nothing where there is none."""
    try:
        proxy = proxy_for(work.credentials.host, work.credentials.port)
    except SettingError as error:
        return [Check("proxy", False, str(error))]
    return [] if proxy is None else [Check("proxy", True, f"{proxy}, since HTTPS_PROXY names it")]


def _rows(work: SiteWork) -> Check:
    """Check that the rows can be read, as far as that is known without a run."""
    data = work.settings.data
    if data is None:
        return Check("rows", True, "those that the experiment's partition gives it, since site.toml has no [data]")
    allowed = None if work.local else work.settings.policy.plugins
    if (missing := missing_source(data, work.folder, allowed)) is not None:
        return Check("rows", False, missing)
    try:
        held = rows_before_a_run(data, work.folder, work.credentials.party)
        persons = "" if data.person is None else f"; one {data.person} has up to {held.rows_per_person:,} of them"
        return Check("rows", True, f"{described(held, 0)}{persons}")
    except Exception as error:  # whatever a file holds
        return _unusable(error)


def _questions(work: SiteWork, rows: Check) -> list[Check]:
    """Return what the ledger of the rows has counted, in all runs; nothing where they cannot be read."""
    data = work.settings.data
    if data is None or not rows.fine:
        return []
    held, state = rows_before_a_run(data, work.folder, work.credentials.party), work.credentials.folder / "state"
    try:
        ledger = row_ledger(held, 0, held.records, state, work.place)
    except SettingError as error:
        return [Check("questions", False, str(error))]
    stated = ", ".join(f"{kind} at most {most}" for kind, most in work.settings.policy.questions.items())
    sentences = [
        ledger.summary or "none was answered about these rows",
        *([f"the policy says {stated}"] if stated else []),
        *([f"{ledger.updates:,} updates left"] if ledger.updates else []),
        *([f"noise has spent epsilon {spent:.3g} at delta {DELTA:g} in all"] if (spent := ledger.spent(DELTA)) else []),
    ]
    place = " and beside the rows" if len(ledger.folders) > 1 else ""
    return [Check("questions", True, f"{'; '.join(sentences)}; counted in its credentials{place}")]


def _unusable(error: BaseException) -> Check:
    """Rows that cannot be used; the message may quote one, so it is for this site and not for the server."""
    message = str(error) if isinstance(error, PiebaldError) else f"{type(error).__name__}: {error}"
    return Check("rows", False, " ".join(message.split()))


def described(clients: Clients, number: int) -> str:
    """The numbers of a site's rows, their shape, and how many there are of each class."""
    rows = {split: clients.rows(number, split) for split in SPLITS}
    sizes = ", ".join(f"{len(part):,} {split}" for split, part in rows.items())
    train = rows["train"]
    sizes = f"{sizes}; inputs {pytree.plain(pytree.form(train.x))}"
    y = train.y
    if not isinstance(y, torch.Tensor) or y.is_floating_point() or y.ndim != 1:
        return sizes
    counts = Counter(int(value) for part in rows.values() for value in torch.as_tensor(part.y).tolist())
    names = clients.classes
    of = {(names[value] if names is not None else f"class {value}"): count for value, count in sorted(counts.items())}
    if names is not None:
        of = {str(name): of.get(name, 0) for name in names}
    shown = [f"{name} {count:,}" for name, count in list(of.items())[:10]]
    return f"{sizes}; {', '.join(shown)}{f' and {len(of) - 10} more classes' if len(of) > 10 else ''}"


def _checked_with_server(
    work: SiteWork, rows: Check, patience: float, met: Callable[[SiteClient], None]
) -> list[Check]:
    """Check that the server answers, and that this site meets its terms."""
    credentials = work.credentials
    address = f"{credentials.host}:{credentials.port}"
    reports: list[str] = []
    link = Link(
        credentials.party, (credentials.host, credentials.port), credentials.folder, SERVER.__eq__, reports.append
    )
    outlet = Outlet(link)
    link.start()
    try:
        reply, trip, seconds = _reply(link, outlet, patience)
        if reply is None:
            reason = link.trouble or f"no answer within {patience:g} seconds"
            sentence = f"{address} does not answer ({reason}): compare host and port, the firewall, and whether it runs"
            if reports:  # there is an answer, and what it lacks is said
                sentence = f"{address}: {'; '.join(reports)}"
            return [rows, Check("server", False, sentence), Check("clock", None, "-"), Check("run", None, "-")]
        server = link.peers.get(SERVER)
        expiry = "" if server is None else f", certificate until {server.expires}"
        reached = Check("server", True, f"{address}, Piebald {reply.version}{expiry}")
        if reply.protocol != PROTOCOL:
            sentence = f"it has {release(reply)}, this site {release()}: {SAME_PROTOCOL}"
            reached = Check("server", False, sentence)
        body = outlet.fetch_terms(reply.terms, timeout=patience) if reply.terms else None
    finally:
        link.stop()
    clock = _clock(reply.time - seconds, trip)
    if not reply.terms:
        return [rows, reached, clock, Check("run", None, "the server has none at work: check again when one is")]
    if body is None:
        return [rows, reached, clock, Check("run", False, "its terms did not arrive: try again")]
    return [*_met(work, rows, bytes(body), met), reached, clock]


def _reply(link: Connected, outlet: Outlet, patience: float) -> tuple[CheckReply | None, float, float]:
    """The server's answer, how long it took, and this machine's clock in the middle of that time."""
    until = time.monotonic() + patience
    # a trouble that has a name is told at once, and not after the whole patience
    while time.monotonic() < until and not link.trouble:
        began = time.time()
        answer = outlet.check(min(5.0, patience))
        if answer is not None:
            ended = time.time()
            try:
                return decode(CheckReply, answer)[0], ended - began, (began + ended) / 2
            except Refused as error:
                link.report(f"the server answered with {error}")
        time.sleep(0.1)
    return None, 0.0, 0.0


def _clock(ahead: float, trip: float) -> Check:
    """Check that the server's clock agrees with this one, as far as a round trip tells."""
    # the server's time is of some moment of the round trip, so up to half of that says nothing
    if abs(ahead) - trip / 2 > CLOCK:
        way = "behind" if ahead > 0 else "ahead of"
        return Check("clock", False, f"this clock is {abs(ahead):,.0f} s {way} the server's: set both by NTP")
    return Check("clock", True, f"{abs(ahead):.1f} s from the server's, at most {CLOCK:g} s are allowed")


def _met(work: SiteWork, rows: Check, body: bytes, met: Callable[[SiteClient], None]) -> list[Check]:
    """Check that the site's rows and policy meet a run's terms; nothing is built before the site consents."""
    folder, policy, offered = work.credentials.folder, work.settings.policy, digest(body)
    try:
        terms = read_values(body)
        if (refused := Consent(folder, policy).reject_reason(offered, terms)) is not None:
            advice = f"it waits for approval: piebald approve {folder} {offered}"
            return [rows, Check("run", False, refused or advice)]
        prepared = work(terms)
        if reason := work.settings.policy.reject_reason(prepared.work):
            raise SettingError(reason)
    except Exception as error:  # whatever a site's own rows and plugins do
        if error.__cause__ is not None and "weights" in str(error):  # see `site_process`: the server gets no reason
            return [rows, Check("weights", False, str(error.__cause__)), Check("run", None, "-")]
        if error.__cause__ is not None:
            return [_unusable(error.__cause__) if rows.fine else rows, Check("run", None, "-")]
        return [rows, Check("run", False, str(error) if isinstance(error, PiebaldError) else type(error).__name__)]
    met(prepared)
    layout = prepared.work.layout
    summary = f"client {prepared.client + 1} of {len(prepared.clients)}, a model of {layout.size:,} parameters"
    # 4 bytes for a number in float32
    space = check_space(work.credentials.folder, SPACE + 4 * _COPIES * layout.size)
    return [
        Check("rows", True, described(prepared.clients, prepared.client)),
        *([Check("columns", None, "; ".join(prepared.unlike))] if prepared.unlike else []),
        Check("run", True, f"{summary}; this site's policy allows it"),
        *([] if space.fine else [space]),
    ]
