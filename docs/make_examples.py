"""Run the notebooks of `piebald new` and write them, with what they print, as pages of the documentation.

python docs/make_examples.py [NAME ...]     write docs/examples/NAME.md, of all notebooks without a name
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from piebald.cli.train import notebook, template

ROOT = Path(__file__).parents[1]
NAMES = ("table", "images", "text", "sites", "method")
NOTICE = "<!-- Made by docs/make_examples.py from piebald/cli/templates/{name}.md: change that, not this page. -->"


def outputs(name: str) -> Iterator[str]:
    """What each cell of a template's notebook prints; it runs in a folder that has the template's files alone."""
    files, cells = template(name)
    made = nbformat.from_dict(notebook(cells))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as sockets:
        for file, text in files.items():
            Path(folder, file).write_text(text, "utf-8")
        kernel = KernelManager(transport="ipc", ip=f"{sockets}/kernel")  # nobody else on this machine can listen
        NotebookClient(made, km=kernel, timeout=600, resources={"metadata": {"path": folder}}).execute()
    return ("\n\n".join(filter(None, map(shown, cell.outputs))) for cell in made.cells if cell.cell_type == "code")


def page(name: str) -> str:
    """The template with what each of its cells prints below it."""
    files, cells = template(name)
    text = files["README.md"]
    for (_, source), printed in zip([cell for cell in cells if cell[0] == "code"], outputs(name), strict=True):
        block = f"```python\n{source}\n```\n"
        text = text.replace(block, f"{block}\n{printed}\n" if printed else block)
    start = f"`piebald new DIR --template {name}` makes a folder with these files and this notebook."
    title, _, rest = text.partition("\n\n")
    return f"{NOTICE.format(name=name)}\n\n{title}\n\n{start}\n\n{rest}"


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
    parser = argparse.ArgumentParser(description="Run the templates' notebooks and write their pages.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a notebook; all without one")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "examples", help="the folder of the pages")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in chosen.names or NAMES:
        (chosen.out / f"{name}.md").write_text(page(name), "utf-8")


if __name__ == "__main__":
    main()
