"""``tools.size``: what it counts."""

from pathlib import Path

import pytest

from tools.size import (
    Source,
    begins_with_of,
    classes_that_stand_twice,
    closure,
    cut_texts,
    lines_by_package,
    measure,
    numbers_in,
    sentence_lengths,
)
from tools.syntax import syntax_tree


def source(path: str, text: str) -> Source:
    return Source(Path(path), text, syntax_tree(text))


def test_lines_are_counted_by_the_folder_of_the_package() -> None:
    files = [source("neaptide/cli.py", "a\n"), source("neaptide/engine/kv/x.py", "a\nb\n")]
    assert lines_by_package(files) == {".": 1, "engine": 2}


def test_the_closure_follows_imports_and_modules_named_in_texts() -> None:
    files = [
        source("neaptide/launch/serve.py", "from neaptide import engine\nCHILD = 'neaptide.child:main'\n"),
        source("neaptide/launch/__init__.py", ""),
        source("neaptide/engine.py", "if TYPE_CHECKING:\n    import neaptide.unseen\n"),
        source("neaptide/child.py", "def main():\n    import neaptide.late\n"),
        source("neaptide/late.py", ""),
        source("neaptide/unseen.py", ""),
    ]
    names = {"neaptide.launch.serve", "neaptide.launch", "neaptide.engine", "neaptide.child", "neaptide.late"}
    assert closure(files) == names


def test_a_package_can_be_left_out_of_the_closure() -> None:
    files = [source("neaptide/a.py", "import neaptide.b\nimport neaptide.bc\n"), source("neaptide/bc.py", "")]
    files += [source("neaptide/b/__init__.py", ""), source("neaptide/b/d.py", "")]
    assert closure(files, "neaptide.a", without="neaptide.b") == {"neaptide.a", "neaptide.bc"}


def test_classes_of_one_name_are_listed_with_their_modules() -> None:
    files = [source("neaptide/a.py", "class A: ...\nclass B: ...\n"), source("neaptide/b.py", "class A: ...\n")]
    assert classes_that_stand_twice(files) == {"A": ["neaptide.a", "neaptide.b"]}


def test_numbers_that_nobody_chose_do_not_count() -> None:
    assert set(numbers_in(source("p.py", "x = 0.5 * n + 1\ny = [True, 0, 'a', 16]\n"))) == {"p.py:1: 0.5", "p.py:2: 16"}


def test_docstrings_of_variables_count_too() -> None:
    assert begins_with_of(source("a.py", '"""Often."""\nX = 1\n"""Of the server."""\n')) == ["a.py:3"]


@pytest.mark.parametrize(
    "text", ['x = 1\n"""Ends here ..."""\n', "# … goes on\nx = 1\n", "x = 1  # and so on …\n", "# a\n# b ...\nx = 1\n"]
)
def test_a_text_that_is_cut_is_found(text: str) -> None:
    assert len(cut_texts(source("a.py", text))) == 1


@pytest.mark.parametrize("text", ["def f() -> None: ...\n", "# a ...\n# and its end\nx = 1\n", "x = '...'\n"])
def test_an_ellipsis_elsewhere_is_none(text: str) -> None:
    assert cut_texts(source("a.py", text)) == []


def test_sentences_are_those_of_prose() -> None:
    page = "# A title of it\n\nOne two three. And [four five](a.md) `x y` six!\n\n```sh\nno words here at all\n```\n"
    page += "| a cell | with three words |\n- an item here\n"
    assert sentence_lengths(page) == [4, 3, 5, 3, 3]


def test_the_notebook_is_left_out(tmp_path: Path) -> None:
    for name in ("README.md", "docs/a.md", "lab/notebook/log.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Three words here.\n")
    assert measure(tmp_path).figures["docs outside the notebook, words"] == 6
