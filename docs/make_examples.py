"""Run the notebooks in examples/ and write them, with what they print and draw, as pages of the documentation.

python docs/make_examples.py [NAME ...]     write docs/examples/NAME.md, of all notebooks without a name
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import jupytext
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NAMES = ("own_data", "cifar10", "federation")
NOTICE = "<!-- Made by docs/make_examples.py from examples/{name}.py: change that, not this page. -->"


def executed(name: str) -> Any:
    """The notebook `examples/NAME.py` with its outputs; it runs in an empty folder."""
    notebook = jupytext.read(ROOT / "examples" / f"{name}.py", fmt="py:percent")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as sockets:
        kernel = KernelManager(transport="ipc", ip=f"{sockets}/kernel")  # nobody else on this machine can listen
        NotebookClient(notebook, km=kernel, timeout=600, resources={"metadata": {"path": folder}}).execute()
    return notebook


def page(name: str) -> str:
    """The executed notebook as Markdown."""
    text = [NOTICE.format(name=name)]
    for cell in executed(name).cells:
        if cell.cell_type == "markdown":
            text += [cell.source]
        else:
            text += [f"```python\n{cell.source.strip()}\n```", *map(shown, cell.outputs)]
    return "\n\n".join(one for one in text if one) + "\n"


def shown(output: Any) -> str:
    """An output of a cell: a table as HTML, anything else as text; nothing of what went to the standard error."""
    if output.output_type == "stream":
        text = "\n".join(line.rstrip() for line in output.text.strip().splitlines())
        return f"```text\n{text}\n```" if output.name == "stdout" else ""
    table = output.data.get("text/html")
    if table is not None:
        return re.sub(r"<style.*?</style>|\n\s*|</?div>| (?:border|class|style)=\"[^\"]*\"", "", table, flags=re.DOTALL)
    return f"```text\n{output.data['text/plain']}\n```"


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description="Run the notebooks in examples/ and write their pages.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a notebook; all without one")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "examples", help="the folder of the pages")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in chosen.names or NAMES:
        (chosen.out / f"{name}.md").write_text(page(name), "utf-8")


if __name__ == "__main__":
    main()
