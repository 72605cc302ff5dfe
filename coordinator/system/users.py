"""Names of users.  A look-up may ask a directory service, so each is made once."""

from __future__ import annotations

import functools
import pwd


@functools.lru_cache(maxsize=1024)
def user_name(user_id: int) -> str:
    """The user's name; the number of a user without one."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except (KeyError, OverflowError):
        return str(user_id)
