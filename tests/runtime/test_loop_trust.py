"""What `trust` stands for holds where the loops are their owners' own: the rule, who it takes, and words."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from loops import found_loop
from msgspec import UNSET
from msgspec.structs import replace
from torch import nn

import atoll
from atoll.peer.settings import RunSettings, decode_settings, encode_settings
from atoll.policy.capability_terms import StateValidationTerms
from atoll.policy.presets import PRESETS
from atoll.runtime.embed.messages import AttachLoopRequest
from atoll.runtime.embed.peer_process import _run_start, _ticket_uses
from atoll.runtime.embed.trust_defaults import forgone
from atoll.runtime.event_log import entries_in
from atoll.runtime.training_spec import FoundingBlobs, founding_blobs, parse_training_spec
from atoll.training.exchange.layout import layout_of
from atoll.training.recipe.methods import cooperative, data_parallel, demo_, powersgd, sparta
from atoll.training.recipe.recipes import ReductionSettings, diloco
from atoll.training.recipe.schedule import SyncSchedule, SyncSchedulePhase
from training import network

LOOPS = 5


def founded(tmp_path: Path, **wish: object) -> FoundingBlobs:
    layout = layout_of(nn.Sequential(*(nn.Linear(64, 128) for _ in range(4))))
    run = found_loop(folder=tmp_path, **wish)
    return founding_blobs(
        *_run_start(AttachLoopRequest(run._request, layout, batch=32), torch.zeros(layout.floats))
    )


def settings_of(tmp_path: Path, **wish: object) -> RunSettings:
    settings = founded(tmp_path, **wish).settings
    assert decode_settings(encode_settings(settings)) == settings and parse_training_spec(settings)
    return settings


def refused(tmp_path: Path, **wish: object) -> str:
    with pytest.raises(atoll.AtollError) as why:
        founded(tmp_path, **wish)
    assert not any(tmp_path.iterdir())
    return str(why.value)


def lies(model: nn.Module) -> None:
    """A thousand times as far, and the other way."""
    for p in model.parameters():
        p.grad.mul_(-1000)


def moved(run: atoll.Run, liar: bool = False, seed: int | None = None) -> tuple[float, int]:
    """How far the agreed model is from where all began, after steps on data of this loop's own; and of how many.

    With a `seed` the data are those of a member that has the same one."""
    model = network(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = torch.cat([p.detach().flatten() for p in model.parameters()])
    with run:
        run.attach(model, optimizer, batch=16)
        draw = torch.Generator().manual_seed(run.shard_index if seed is None else seed)
        while not run.done:
            x = torch.randn(16, 64, generator=draw)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            if liar:
                lies(model)
            optimizer.step()
        last = torch.cat([p.detach().flatten() for p in model.parameters()])
        return float((last - first).norm()), run.members


@pytest.fixture(autouse=True)
def one_ticket_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `atoll.local` has it; else a ticket of a run whose members may lie admits one."""
    monkeypatch.setenv("ATOLL_TICKET_USES", f"{LOOPS}")


def loops(tmp_path: Path, whose: list[dict], **wish: object) -> list[tuple[float, int]]:
    founder = found_loop(folder=tmp_path / "0", start_peers=len(whose), **wish)
    with ThreadPoolExecutor(len(whose)) as pool:
        ends = [pool.submit(moved, founder, **whose[0])]
        while not founder.ticket and not ends[0].done():
            wait(ends, 0.02)
        for k, each in enumerate(whose[1:], 1):
            ends.append(pool.submit(moved, atoll.join(founder.ticket, folder=tmp_path / f"{k}"), **each))
        return [end.result() for end in ends]


def test_a_number_of_uses_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATOLL_TICKET_USES", "many")
    with pytest.raises(atoll.UsageError, match="E-ATT-11 ATOLL_TICKET_USES='many'"):
        _ticket_uses()


@pytest.mark.net
@pytest.mark.parametrize(
    ("wish", "withstands"),
    [({"statistic": "mean"}, False), ({}, True), ({"statistic": "nnm + median"}, True), ({"trust": "open"}, True)],
    ids=["mean", "community", "mixed", "open"],
)
def test_one_poisoner_among_five_loops_breaks_a_mean_and_not_what_trust_stands_for(
    tmp_path: Path, peers_in_threads: None, wish: dict[str, object], withstands: bool
):
    """Its boosted, turned round gradients are a row like any other. Whole peers, with their sockets, in threads."""
    wish = {"trust": "community", "rounds": 1, "inner_steps": 1} | wish
    (far, members), *_ = loops(tmp_path, [{}, {"liar": True}, *([{}] * (LOOPS - 2))], **wish)
    assert members == LOOPS
    assert far < 0.2 if withstands else far > 2.0, f"moved by {far}; an honest step is some hundredths"


@pytest.mark.net
def test_loops_that_send_the_same_update_all_count_and_everybody_hears_of_it(
    tmp_path: Path, peers_in_threads: None
):
    """Two of three learn from the same data in the same order: honest, and worth one of them."""
    ends = loops(tmp_path, [{"seed": 7}, {"seed": 7}, {}], rounds=2, inner_steps=2)
    assert all(members == 3 for _, members in ends)
    closed = [e for e in entries_in(tmp_path / "2" / "facts.jsonl") if e["fact"] == "RoundClosed" and e["counted"]]
    assert len(closed) == 2 and all(len(entry["counted"]) == 3 for entry in closed)
    assert [len(peers) for entry in closed for peers in entry["alike"]] == [2, 2]
    assert closed[0]["alike"] == closed[1]["alike"]


@pytest.mark.parametrize("trust", PRESETS)
def test_a_run_of_seven_loops_has_what_its_trust_stands_for(tmp_path: Path, trust: str):
    """But for audits and records, which are of steps that others can take again."""
    settings, preset = settings_of(tmp_path, trust=trust, start_peers=7), PRESETS[trust]
    assert settings.statistic == (preset.statistics[0] if preset.statistics else "mean")
    assert (settings.tolerance, settings.witnessed) == (preset.tolerance, preset.witnessed)
    assert settings.round.quorum == preset.quorum
    assert settings.min_peers == {"private": 1, "community": 5, "open": 4}[trust], "it waits, and never averages"
    assert (settings.opened.share if settings.opened else 0.0) == preset.openings
    assert not settings.audited_share and not settings.reputed
    assert settings.validated == (None if trust == "private" else StateValidationTerms(every=2)), (
        "rounds of fifty steps"
    )


@pytest.mark.parametrize(("peers", "statistic"), [(4, "trimmed_mean"), (5, "robust"), (65, "trimmed_mean")])
def test_a_default_rule_is_one_that_the_loops_can_keep(tmp_path: Path, peers: int, statistic: str):
    assert settings_of(tmp_path, trust="community", start_peers=peers).statistic == statistic


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"trust": "open", "start_peers": 3}, "among 3 members"),
        ({"trust": "community"}, 'start_peers=4.*peers=4; or trust="private"'),
        ({"trust": "community", "statistic": "mean", "start_peers": 3}, "among 3 members.*start_peers=4"),
        ({"trust": "community", "start_peers": 7, "min_peers": 2}, "among 2 members.*min_peers=4"),
        ({"trust": "open", "start_peers": 7, "min_peers": 2}, "among 2 members.*min_peers=4"),
        ({"trust": "open", "statistic": "mean"}, "start_peers=4"),
        ({"trust": "community", "statistic": "robust", "start_peers": 4}, "start_peers=5"),
        ({"trust": "community", "statistic": "nnm + krum", "start_peers": 4}, "start_peers=5"),
        ({"statistic": "median", "start_peers": 7}, 'trust="private" assumes that there are none'),
        (
            {"trust": "open", "statistic": "robust", "start_peers": 7},
            'trust="community", .*statistic="robust"',
        ),
        ({"min_peers": 3, "start_peers": 2}, "start_peers=3"),
        ({"trust": "community", "start_peers": 9, "sample_peers": 4}, "sample_peers=5"),
        ({"trust": "community", "start_peers": 9, "sample": 0.5, "group": "a"}, "group of its own"),
    ],
)
def test_what_would_withstand_nobody_is_refused_before_anything_is_written(tmp_path: Path, wish: dict, says: str):
    import re

    told = refused(tmp_path, **wish)
    assert "E-ATT-15" in told and re.search(says, told, re.DOTALL), told


def test_what_a_run_lacks_of_its_trust_is_told_to_who_founds_it(tmp_path: Path, peers_in_threads: None, caplog):
    """What is not possible is not refused, and not hidden. Loops without a held-out loss hear so."""
    for peers, trust, codec in ((4, "community", "topk:0.1+int8"), (1, "private", "int8")):
        loops(tmp_path / trust, [{}] * peers, trust=trust, up=codec, rounds=1, inner_steps=1)
        told, asked = caplog.text, trust == "community"
        assert told.count("run.attach(model, optimizer, validate=…)") == (peers if asked else 0)
        assert ("no training is audited" in told) is asked
        assert ("sums of owners are not checked: up = " in told) is asked, told
        caplog.clear()


def test_whoever_founds_a_run_of_loops_hears_of_the_rule_for_data_that_differ():
    """Loops bring data of their own; a rule that a member named was chosen, and a mean takes no member
    for a liar.
    """
    recipe = data_parallel(rounds=1)
    for trust, said, statistic, told in (
        ("community", None, "robust", True),
        ("open", None, "trimmed_mean", True),
        ("community", "robust", "robust", False),
        ("community", None, "mean", False),
        ("private", None, "mean", False),
    ):
        lacks = forgone(trust, said, statistic, recipe)
        words = " ".join(text for text in lacks if 'statistic="clipped_caf"' in text)
        assert bool(words) is told, (trust, said, statistic)
        assert ('trust="community"' in words) is (trust == "open"), "with open the rule is refused"


def test_recipes_in_loops_are_held_to_their_trust_as_those_of_built_in_trainers_are(tmp_path: Path):
    """Means of gradients become the rule's; what withstands no liar is refused where there may be some."""
    for trust, statistic in (("community", "robust"), ("open", "trimmed_mean")):
        wish = {"trust": trust, "start_peers": 7}
        settings = settings_of(tmp_path, recipe=data_parallel(rounds=9), **wish)
        assert settings.statistic == statistic and settings.topology == "butterfly"
        for recipe, code in (
            (cooperative(rounds=9), "E-RUN-18"),
            (powersgd(rounds=9), "E-RUN-18"),
            (demo_(rounds=9), "E-RUN-18"),
        ):
            assert code in refused(tmp_path, recipe=recipe, **wish), recipe
        settings = settings_of(tmp_path, recipe=sparta(rounds=9), **wish)
        assert settings.statistic == statistic and settings.openings is UNSET


PHASED = replace(
    diloco(rounds=9), schedule=SyncSchedule(inner_steps=50, rounds=9, phases=(SyncSchedulePhase(0.5, 10),))
)
HASTY = replace(diloco(rounds=9), reducer=ReductionSettings(quorum=2, grace=2))
KEY = re.compile(r"\b(?:run|train|sync|model|data|keep|consensus)\.(?!md)[a-z_]+")


@pytest.mark.parametrize(
    ("wish", "code", "says"),
    [
        ({"fragments": 25}, "E-RUN-01", "or fewer fragments"),
        ({"recipe": cooperative(rounds=9), "trust": "open"}, "E-RUN-18", 'trust="private", or another recipe'),
        ({"recipe": HASTY, "trust": "open"}, "E-RUN-19", "a recipe of quorum=0"),
        ({"recipe": PHASED, "target_samples": 100}, "E-RUN-22", "a recipe without phases"),
        ({"overlap": 2, "sample": 0.5}, "E-RUN-22", "leave both out"),
        ({"overlap": 2, "target_samples": 100}, "E-ATT-12", "(inner_steps_min)"),
    ],
)
def test_what_cannot_be_founded_is_told_in_arguments_and_not_in_keys_of_a_file(
    tmp_path: Path, wish: dict[str, object], code: str, says: str
):
    """A loop has no run.toml: a member that reads `sync.fragments` there would look for a file."""
    text = refused(tmp_path, start_peers=7, **wish)
    assert text.startswith(code) and says in text
    assert not KEY.findall(text)
