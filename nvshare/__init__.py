"""Share one GPU between processes: time slices, oversubscribed memory, live control.

The folders beside this file are links to the top-level folders of the repository: installed, they are this package.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from nvshare.client_hook import on_pressure as on_pressure
    from nvshare.client_hook import release_caches as release_caches
    from nvshare.client_hook import step as step

    __version__: str

if sys.version_info < (3, 11):  # noqa: UP036 - from a checkout; pip refuses to install
    raise ImportError(
        f"nvshare needs Python 3.11 or newer, this is {sys.version_info[0]}.{sys.version_info[1]}: make an environment "
        "with a newer one, such as `conda create -n gpu python=3.12` or `uv venv --python 3.12`"
    )


if not TYPE_CHECKING:

    _LATE = ("__version__", "on_pressure", "release_caches", "step")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATE})

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "__version__":
            from nvshare.coordinator.system.version import version

            return version()
        from nvshare import client_hook

        return getattr(client_hook, name)


def load_ipython_extension(shell: "Any") -> None:
    """`%load_ext nvshare` in a notebook: the magic `%gpu`."""
    from nvshare.coordinator.cli.jupyter import magic

    magic.load(shell)
