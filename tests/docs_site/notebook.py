"""A notebook as a page: its text, its code, and what was printed and drawn when it was last run."""

import base64
import json
from pathlib import Path


def page(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """The text of a page, and {file name: contents} of the drawings beside it."""
    parts, drawings = [], {}
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif drawing := output["data"].get("image/png"):
                name = f"{notebook.stem}-{len(drawings)}.png"
                drawings[name] = base64.b64decode(drawing)
                parts.append(f"![what this draws]({name})")
            else:
                parts.append(f"```text\n{''.join(output['data']['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n", drawings
