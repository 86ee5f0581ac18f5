"""Which options count as changed when a run goes on."""

from pathlib import Path

from areax.adapters.tracking import run_dir
from areax.recipes import sft
from areax.recipes.shared import resume


def test_another_path_to_the_same_folder_is_no_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    Path("other").mkdir()
    Path("link").symlink_to("model")
    config = lambda model: sft.Config(model=model, data="gone.jsonl", out="run")
    Path("run").mkdir()
    run_dir.write_config(Path("run"), config("model"))
    assert resume.changes(config(str(tmp_path / "model"))) == resume.changes(config("link")) == []
    assert resume.changes(config("other")) == ["--model model -> other"]
    assert resume.changes(config("org/name")) == ["--model model -> org/name"]
