"""Which pages of a pool are in use, and by how many sequences and cached prefixes; on the host."""

from __future__ import annotations

import heapq


class Pages:
    """Pages 1 to `count`, each with a number of users; page 0 takes what idle slots write.

    Attributes:
      most: the highest page that was ever taken.
    """

    def __init__(self, count: int):
        self.count, self.most = count, 0
        self._users = [0] * (count + 1)
        self._free = list(range(1, count + 1))  # a heap: low pages first, so that fewer have to be wiped

    @property
    def free(self) -> int:
        """How many pages have no user."""
        return len(self._free)

    def users(self, page: int) -> int:
        return self._users[page]

    def take(self) -> int:
        """A free page, for one user; 0 if there is none."""
        if not self._free:
            return 0
        page = heapq.heappop(self._free)
        self._users[page] = 1
        self.most = max(self.most, page)
        return page

    def share(self, page: int) -> int:
        """The page, for one more user."""
        assert self._users[page] > 0
        self._users[page] += 1
        return page

    def give(self, page: int) -> None:
        """Ends one use of a page, if it is not 0; without users it is free."""
        if page:
            self._users[page] -= 1
            assert self._users[page] >= 0
            if self._users[page] == 0:
                heapq.heappush(self._free, page)
