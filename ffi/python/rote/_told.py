"""Facts, as the library takes them."""

from __future__ import annotations

import itertools
import operator
from array import array
from typing import Any

from . import _facts
from ._identity import address
from ._native import addresses, c_texts, check, ids, lib
from ._numbers import DICT_ITEM

_parts_of_fact = operator.attrgetter("kind", "container", "key", "guard", "hyperparameter", "subject", "expected")


class Told:
    """Facts in arrays. Whoever has made them keeps what they are about."""

    def __init__(self, facts: list[_facts.Fact]) -> None:
        """``facts``: at least one."""
        kinds, containers, keys, guards, rates, subjects, expected = zip(*map(_parts_of_fact, facts), strict=True)
        #: What they are about, by address.
        self.containers = array("Q", map(address, containers))
        # A dict may have the key None.
        of_keys = (
            0 if key is None and kind != DICT_ITEM else address(key) for kind, key in zip(kinds, keys, strict=True)
        )
        texts = c_texts(itertools.chain.from_iterable(zip(subjects, expected, strict=True)))
        self._count, self._kinds, self._keys = len(facts), ids(kinds), addresses(of_keys)
        self._others = ids(guards), bytes(rates), texts

    def tell(self, session: Any, containers: array[int] | None = None) -> None:
        """Adds the facts to the recording of a session. ``containers``: what they are about there."""
        about = addresses(self.containers if containers is None else containers)
        check(lib.rote_record_facts(session, self._count, self._kinds, about, self._keys, *self._others))
