"""The sentences of RESULTS.md that state figures: read from its own tables, so that text and tables cannot differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shared.markdown import block, cells, put

Rows = Mapping[str, list[str]]
OWN, LABEL_FREE, SHUFFLED_0 = 0, 2, 0  # columns, without that of the names


def rows(text: str, name: str) -> Rows:
    """Return the cells of a table's rows by their first cells."""
    lines = [cells(line) for line in block(text, name).splitlines() if line.startswith("|")]
    return {line[0]: line[1:] for line in lines[2:]}


def mean(cell: str) -> float:
    """Return the number of a cell without its interval."""
    return float(cell.partition(" ± ")[0])


def says(cell: str) -> str:
    """Return what a difference with its interval says."""
    value, _, half = cell.partition(" ± ")
    if not half:
        return "no verdict"
    return "cannot be told apart" if abs(float(value)) <= float(half) else "gains" if float(value) > 0 else "loses"


def beside(text: str) -> str:
    """What was measured besides the paper's claims."""
    switches, images, why = rows(text, "switches"), rows(text, "images"), rows(text, "why")
    office, signals, cost = rows(text, "office"), rows(text, "signals"), rows(text, "cost")
    plain = mean(images["plain"][SHUFFLED_0])
    private, local = (mean(images[name][SHUFFLED_0]) - plain for name in ("plain, private head", "Local"))
    none = {
        "label-free clusters": why["*CGAU minus gated, no conditioning*"][LABEL_FREE],
        "domains": office["gated, no conditioning"][2],
        "people": signals["gated, no conditioning"][2],
    }
    longer = sorted(100 * (float(cell.split()[2]) - 1) for cell in cost["CGAU"][3:5])
    lines = [
        "| what | found here |",
        "| --- | --- |",
        f"| an averaged one-hot matrix instead of private vectors | {switches['CGAU, averaged matrix'][1]} of "
        f"{switches['CGAU'][1]} points, against no conditioning |",
        f"| other ways to personalise, nothing shuffled, against plain | a private last layer {private:+.1f}, Local "
        f"{local:+.1f}, CGAU {images['*CGAU minus plain*'][SHUFFLED_0]} |",
        "| conditioning where the client does not reveal the label, against none | "
        f"{'; '.join(f'{name} {cell}: {says(cell)}' for name, cell in none.items())} |",
        f"| time of a round, against plain | {longer[0]:.0f} to {longer[1]:.0f} % longer; the paper about 85 % |",
    ]
    return "\n".join(lines)


def identity(text: str) -> str:
    """What the client's identity tells of the label."""
    why = rows(text, "why")
    both, place = (mean(why[f"label from {name} alone"][OWN]) for name in ("client and position", "position"))
    plain = mean(why["plain"][OWN])
    private, local = (mean(why[name][OWN]) - plain for name in ("plain, private head", "Local"))
    free = why["*CGAU minus gated, no conditioning*"][LABEL_FREE]
    return (
        f"The client's identity adds {both - place:.0f} points to a predictor that sees only the position.  Of these "
        f"conditioning gains {why['*CGAU minus gated, no conditioning*'][OWN]}, a private last layer {private:.1f} and "
        f"Local {local:.1f} (the latter two against plain).  With clusters that do not depend on labels, conditioning: "
        f"{free}, {says(free)}."
    )


def parts(text: str) -> str:
    """What each part of the conditioning gains."""
    switches = rows(text, "switches")
    names = ("CGAU, filter only", "CGAU, gate only", "CGAU", "CGAU, shared bias, too")
    one, two, whole, bias = (switches[name][1] for name in names)
    return (
        f"Against no conditioning, the filter alone gains {one}, the gate alone {two}, both {whole}, and both with a "
        f"shared bias {bias}."
    )


def owners(text: str) -> str:
    """Gated units where clients are natural owners."""
    lines = []
    for name, title in (("office", "Domains"), ("signals", "People")):
        found = rows(text, name)
        lines.append(
            f"- {title}: CGAU against ReLU {found['plain'][2]}: {says(found['plain'][2])}; against the gated unit "
            f"without conditioning {found['gated, no conditioning'][2]}: {says(found['gated, no conditioning'][2])}; "
            f"against Local {found['Local'][2]}: {says(found['Local'][2])}."
        )
    return "\n".join(lines)


def newcomers(text: str) -> str:
    """What adapting to a newcomer is worth where the client reveals the label."""
    for line in map(cells, block(text, "newcomers").splitlines()[2:]):
        if line[:2] == ["shuffle 0.0", "CGAU"]:
            whole, own, head, every = line[3:7]
            return (
                f"Where the client reveals the label, a newcomer is at {whole} % with the global model, {own} % with a "
                f"conditioning of its own, {head} % with its own last layer, and {every} % with all parameters adapted."
            )
    return ""


PROSE: dict[str, Callable[[str], str]] = {
    "beside": beside, "identity": identity, "parts": parts, "owners": owners, "newcomers prose": newcomers,
}  # fmt: skip


def fill(text: str) -> str:
    """Return a RESULTS.md whose blocks of sentences follow from the tables in it; without a table they stay."""
    for name, make in PROSE.items():
        try:
            made = make(text)
        except (KeyError, IndexError, ValueError):  # a table that is not there yet
            continue
        text = put(text, name, made)
    return text
