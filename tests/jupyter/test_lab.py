"""Two notebooks in a real JupyterLab, used with mouse and keyboard."""

from __future__ import annotations

import getpass

import pytest

from tests.browser import find
from tests.conftest import ROOT
from tests.jupyter import lab, picture

EXECUTABLE = find()


@pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium here: apt-get install chromium-headless-shell")
def test_two_notebooks_in_a_browser() -> None:
    """Broken: the kernel is not found by JupyterLab, `%gpu` shows nothing, or a cell waits in silence."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed: pip install '.[test]'")
    pytest.importorskip("cupy", reason="CuPy is not installed: pip install '.[cupy]'")
    assert EXECUTABLE is not None
    with lab.opened(EXECUTABLE) as made:
        lab.share(made)
        shown = made.output(lab.EXPLORE, 2)
        assert shown.strip() == f"nvshare: waiting for GPU 0, held by train.ipynb ({getpass.getuser()}); next in line"
        made.interrupt(lab.TRAIN)
        assert "done" in made.await_output(lab.EXPLORE, 2, "nvshare: GPU 0 after ")
        made.await_output(lab.TRAIN, 2, "KeyboardInterrupt")
        assert made.page.complaints == []


def test_the_picture() -> None:
    """Broken: the picture is in no page, or makes the documentation heavy."""
    assert picture.PICTURE.stat().st_size < 150 << 10
    page = (ROOT / "docs" / "tutorials" / "notebooks.md").read_text(encoding="utf-8")
    assert f"](../pictures/{picture.PICTURE.name})" in page
