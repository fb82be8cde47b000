"""Messages, statements and facts carry tags of their own: names on the wire do not follow class names."""

from collections import Counter
from importlib import import_module
from pkgutil import walk_packages

import atoll
from atoll.base.machine import Fact, Message, tag_of
from atoll.wire.messages.statements import BaseStatement


def subclasses(kind: type) -> set[type]:
    found = set(kind.__subclasses__())
    return found.union(*map(subclasses, found))


def test_every_message_statement_and_fact_has_a_tag_of_its_own():
    """A class that inherits its tag, or has the tag of another, could not be told apart by its reader."""
    for module in walk_packages(atoll.__path__, "atoll."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    for base in (Message, BaseStatement, Fact):
        kinds = [kind for kind in subclasses(base) if kind.__module__.startswith("atoll.")]
        assert len(kinds) > 20
        assert [tag for tag, count in Counter(map(tag_of, kinds)).items() if count > 1] == []
