"""The viewer's indices are in a cache of the tests; figures are drawn quickly."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def quick_figures(monkeypatch):
    """Figures without layout and with ten dots per inch: drawing takes most of the time of a report."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    save = Figure.savefig
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **more: save(self, *args, dpi=10, **more))
