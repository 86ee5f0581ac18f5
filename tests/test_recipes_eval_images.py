"""An evaluation of rows with images, on a server that is scripted: what it is asked, and what is written."""

import base64
import json

import aiohttp.web
import pytest
import vlm
from scripted import V0, reply, run, serving

from areax.adapters import tokenizer
from areax.adapters.data import images
from areax.recipes import eval as evaluate
from areax.rollout.chat import images as chat_images
from areax.rollout.types import Sampling

FIRST, SECOND = vlm.png(8, 8, 1), vlm.png(12, 12, 2)  # 4 and 9 features


@pytest.mark.parametrize("workflow", ["single_turn", "multi_turn:multi_turn"])
def test_rows_with_images(tmp_path, workflow):
    model = vlm.folder(tmp_path / "model")
    processor, says = images.load(model), [*tokenizer.load(model).encode("x"), 3]
    (tmp_path / "b.png").write_bytes(SECOND)
    url = "data:image/png;base64," + base64.b64encode(FIRST).decode()
    rows = [{"prompt": "<image>a", "images": [url], "answer": "x"}, {"prompt": "b", "image": "b.png", "answer": "y"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def reward(text, row):\n    return float(text == row['answer'])\n")

    async def answer(request, body):
        """Says x."""
        read = processor.expanded(body["input_ids"], list(map(images.read, body["image_data"])))
        whole = reply(says, [-1.0, -1.0], [V0, V0], "stop")
        whole["meta_info"]["prompt_tokens"] = len(read)
        return aiohttp.web.json_response(whole)

    async def main():
        async with serving() as a:
            a.script = [answer] * 4
            config = evaluate.Config(
                model=str(model), data=str(tmp_path / "rows.jsonl"), reward=f"{tmp_path}/reward.py:reward",
                workflow=f"areax.rollout.workflows{'.' if ':' in workflow else ':'}{workflow}", servers=(a.url,),
                sampling=Sampling(temperature=0.0, max_new_tokens=4), out=str(tmp_path / "out"),
                workflow_options='{"turns": 1}' if ":" in workflow else "",
            )  # fmt: skip
            return await evaluate.run(config), a.generated()

    results, asked = run(main)
    assert results["accuracy"] == 0.5
    seen = [images.read(data).data for body in asked for data in body["image_data"]]
    assert sorted(seen) == sorted([FIRST, SECOND]) and all(b["input_ids"].count(vlm.IMAGE) == 1 for b in asked)
    text = (tmp_path / "out" / "answers.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["answers"][0].removesuffix("<|im_end|>") for line in lines] == ["x", "x"]
    assert [line["rewards"] for line in lines] == [[1.0], [0.0]]
    assert "base64" not in text and lines[0]["row"]["images"] == [chat_images.shown(url)]
    assert lines[0]["prompt"].count("<|image_pad|>") == 1
