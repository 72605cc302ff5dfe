"""Names of users.  A look-up may ask a directory service for seconds, so each is made once."""

from __future__ import annotations

import functools
import pwd
import threading
from typing import Final

_known: Final[dict[int, str]] = {}
_MOST: Final = 1024


@functools.lru_cache(maxsize=1024)
def user_name(user_id: int) -> str:
    """The user's name; the number of a user without one."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except (KeyError, OverflowError):
        return str(user_id)


def known_name(user_id: int) -> str:
    """As `user_name`, without waiting: the number until a thread has found the name."""
    if user_id not in _known and len(_known) < _MOST:
        _known[user_id] = str(user_id)
        threading.Thread(target=lambda: _known.update({user_id: user_name(user_id)}), daemon=True).start()
    return _known.get(user_id, str(user_id))
