"""Shared states that an island has at hand."""

from __future__ import annotations

import threading
from pathlib import Path

from torch import nn

from atoll.base.ids import Digest
from atoll.host.shelf import Shelf
from atoll.host.store import Store
from atoll.learn.layout import layout_of
from atoll.learn.state import initial_state


class TidiedMeanwhile(Store):
    """The other thread tidies up the moment that a blob is on the disk."""

    tidy = threading.Thread()

    def put_blob(self, data) -> Digest:
        name = super().put_blob(data)
        self.tidy.start()
        self.tidy.join(0.5)  # it gets so long; whoever has to wait for us gets nothing done
        return name


def test_a_state_is_not_tidied_away_while_it_is_put(tmp_path: Path):
    """Once its bytes were dropped between the disk and the list: agreed on, and gone after a restart."""
    store = TidiedMeanwhile(tmp_path)
    shelf = Shelf(store)
    store.tidy = threading.Thread(target=shelf.tidy, args=(set(), 0))
    model = nn.Linear(2, 2)
    name = shelf.put(initial_state(model), layout_of(model))
    store.tidy.join()
    assert store.has_blob(name)
