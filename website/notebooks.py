"""Notebooks of docs/tutorials: `python -m website.notebooks [NAME …]` runs them and keeps what they print and draw.

The site shows each as a page. A test runs them as they stand; nothing here needs Jupyter.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
DRAWN = "image/png"


def page(path: Path) -> str:
    """A notebook as Markdown: text as it is, code in fences, what it printed and drew below."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                parts.append(f"![what the code above drew](data:{DRAWN};base64,{output['data'][DRAWN]})")
    return "\n\n".join(parts) + f"\n\nThis page is the notebook `docs/tutorials/{path.name}`.\n"


def play(path: Path) -> None:
    """Run the code cells from the first to the last, in an empty folder, and write their outputs into the notebook."""
    import matplotlib.pyplot as plt

    book = json.loads(path.read_text(encoding="utf-8"))
    known: dict[str, Any] = {"__name__": "notebook"}
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for number, cell in enumerate(code, 1):
            with redirect_stdout(io.StringIO()) as stream:
                exec("".join(cell["source"]), known)
            cell["execution_count"] = number
            cell["outputs"] = _said(stream.getvalue()) + [_drawn(plt.figure(figure)) for figure in plt.get_fignums()]
            plt.close("all")
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _said(text: str) -> list[dict[str, Any]]:
    return [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else []


def _drawn(figure: Any) -> dict[str, Any]:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80, bbox_inches="tight")
    data = base64.b64encode(file.getvalue()).decode()
    return {"output_type": "display_data", "metadata": {}, "data": {DRAWN: data, "text/plain": ["a figure"]}}


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    for found in sorted(FOLDER.glob("*.ipynb")):
        if not sys.argv[1:] or found.stem in sys.argv[1:]:
            play(found)
