"""All-reduce among members of whom some may lie: what such a group fixes, and what it refuses to promise."""

from __future__ import annotations

import pytest
from grouped import found

from atoll.base.errors import UsageError
from atoll.peer.settings import RunSettings
from atoll.policy.capability_terms import OPENED_SHARE, SumCheckTerms
from atoll.runtime.allreduce.trust import distrusting


def test_a_group_whose_members_may_lie_checks_its_owners_or_has_them_watched():
    checked = distrusting(RunSettings(), "community", "robust", "int8", "fp32", 5)
    assert checked.opened == SumCheckTerms(OPENED_SHARE, 4 * 4096) and not checked.witnessed
    assert (checked.statistic, checked.tolerance, checked.round.quorum) == ("robust", 0.33, "two-thirds")
    watched = distrusting(RunSettings(), "open", "median", "topk:0.1+int8", "int8", 4)
    assert watched.witnessed and watched.opened is None
    assert distrusting(RunSettings(), "private", "mean", "int8", "int8", 2) == RunSettings()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"trust": "everybody"}, "choose one of private, community, open"),
        ({"statistic": "median"}, 'use trust = "community"'),
        ({"trust": "open", "statistic": "robust", "peers": 7}, 'use trust = "community"'),
        ({"trust": "community", "statistic": "median", "peers": 3}, "peers = 4"),
        ({"trust": "community", "peers": 4, "codec": "topk:0.1+int8"}, 'use codec = "int8"'),
        ({"trust": "open", "peers": 4, "way_back": "randk:0.1"}, 'trust = "private"'),
        ({"trust": "community", "peers": 4, "way_back": "gathered"}, 'trust = "private"'),
        ({"trust": "open", "peers": 4, "remembered": True}, 'trust = "private"'),
        ({"trust": "open", "peers": 4, "codec": "lowrank:4"}, 'use codec = "topk:0.1+int8"'),
        ({"trust": "open", "peers": 4, "codec": "int8+zstd"}, 'use way_back = "int8"'),
        ({"trust": "open", "peers": 4, "topology": "ring"}, 'use topology = "butterfly"'),
        ({"trust": "community", "peers": 4, "topology": "tree"}, 'use topology = "butterfly"'),
    ],
)
def test_a_group_that_would_withstand_nobody_is_not_founded(asked: dict[str, object], says: str):
    """Told before anything listens, with the way out."""
    with pytest.raises(UsageError) as refused:
        found(**asked)
    assert refused.value.code == "E-RED-14" and says in refused.value.fix
