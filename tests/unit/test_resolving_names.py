"""Names and what they stand for: errors that say what would be right, and no import before an entry is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rl import registry

SHAPES = {"circle": "shapes:Circle", "square": "shapes:Square"}
MODULE = """
class Shape:
    corners = 0
    def area(self): raise NotImplementedError

class Circle(Shape): ...

def square(): ...
"""


@pytest.fixture(autouse=True)
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shapes.py").write_text(MODULE)
    (tmp_path / "needy.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "broken.py").write_text("raise AttributeError('of the module itself')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shapes", raising=False)


def test_a_name_stands_for_its_entry_and_a_target_for_itself() -> None:
    assert registry.target_of(SHAPES, "circle", "shape 'circle'") == "shapes:Circle"
    assert registry.target_of(SHAPES, "mine:Ellipse", "shape") == "mine:Ellipse"
    assert registry.load("shapes:Circle.area", "shape").__name__ == "area"


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(
        ValueError, match="^--shape cirle is unknown; did you mean circle\\? There are circle, square, or module"
    ):
        registry.target_of(SHAPES, "cirle", "--shape cirle")
    with pytest.raises(ValueError, match="^--shape zzz is unknown\\. There are circle, square"):
        registry.target_of(SHAPES, "zzz", "--shape zzz")
    assert registry.did_you_mean("squar", SHAPES) == "; did you mean 'square'?"
    assert registry.did_you_mean("zzz", SHAPES) == ""
    assert (
        registry.find_similar("circus", SHAPES, cutoff=0.5) == "circle"
        and registry.find_similar("circus", SHAPES, cutoff=0.9) is None
    )


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("circle", "'circle' is not of the form module:function"),
        ("no_such_module:f", "cannot import the module 'no_such_module': No module named"),
        ("needy:f", "cannot import the module 'needy': No module named 'not_installed_anywhere'"),
        ("shapes:Cube", "cannot be imported: the module 'shapes' has no 'Cube'"),
        ("shapes:Circle.volume", "the module 'shapes' has no 'Circle.volume'"),
    ],
)
def test_a_target_that_is_not_there_says_what_is_missing(target: str, error: str) -> None:
    with pytest.raises(ValueError, match=f"^shape.*{error}"):
        registry.load(target, "shape")


def test_what_a_module_itself_raises_is_not_taken_for_a_missing_name() -> None:
    with pytest.raises(AttributeError, match="of the module itself"):
        registry.load("broken:f", "shape")
    with pytest.raises(ValueError, match="^shape: cannot import the module 'broken': AttributeError: of the module itself"):
        registry.load("broken:f", "shape", wraps=Exception)


def test_a_class_must_derive_from_what_is_wanted() -> None:
    assert registry.load_class("shapes:Circle", "shape", "shapes:Shape").__name__ == "Circle"
    for target in ("shapes:square", "pathlib:Path"):
        with pytest.raises(ValueError, match=f"shape: {target} is not a subclass of shapes:Shape"):
            registry.load_class(target, "shape", "shapes:Shape")


def test_reading_a_registry_imports_none_of_its_entries() -> None:
    heavy = ["torch", "numpy", "transformers", "ray", "vllm"]
    program = (
        "import sys, mindspeed_rl.data, mindspeed_rl.inference.tasks, mindspeed_rl.models, mindspeed_rl.rewards\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
