"""What `jfuse.cli.passages` refuses, before any model is loaded."""

import pytest

from jfuse.cli.passages import read_files


@pytest.mark.parametrize("name, content", [("a.jsonl", ""), ("a.jsonl", "\n\n"), ("a.txt", " \n"), ("b.md", "\ufeff")])
def test_files_without_any_text_are_an_error(tmp_path, name, content):
    """T-05: a store that stays empty is no success; an empty file beside others is just skipped."""
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"no text in .*{name}; give files that hold passages"):
        read_files([tmp_path / name])
    (tmp_path / "c.txt").write_text("The Nile.")
    assert [passage.text for _, passage in read_files([tmp_path / name, tmp_path / "c.txt"])] == ["The Nile."]


@pytest.mark.parametrize("name", ["absent", "absent.pdf", "absent.jsonl"])
def test_a_path_that_is_not_there_is_named(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=name):
        read_files([tmp_path / name])
