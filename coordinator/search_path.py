"""Makes a command take the packages of its own installation: PYTHONPATH leaves this interpreter's search path.

PYTHONPATH may be another Python's (HPC modules, ROS, Spack), with packages that do not fit this one.  It stays where
nvshare itself was found by it, and in the environment, for the programs that a command starts.

Each command imports this module before any third-party package; no user's program does.
"""

import os
import sys

_given = {os.path.realpath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
if os.path.dirname(os.path.realpath(sys.modules["nvshare"].__path__[0])) not in _given:
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) not in _given]
