"""`atoll plan`, in this process: what it says, and that its numbers hang together."""

import json

import pytest

from atoll.base.errors import UsageError
from atoll.cli.plan import plan
from atoll.training.recipe.methods import auto


def told(capsys: pytest.CaptureFixture[str], model: str = "1B", peers: int = 8, uplink: str = "20Mbit", **more):
    plan(model=model, peers=peers, uplink=uplink, json=True, **more)
    return json.loads(capsys.readouterr().out)


def test_a_billion_parameters_over_home_links(capsys: pytest.CaptureFixture[str]):
    """int8 both ways at 20 Mbit/s: seven eighths of a gigabyte, twice, at 2.5 MB/s; a little more for scales."""
    answer = told(capsys, tokens_per_s=3000)
    rows = {row["recipe"]: row for row in answer["recipes"]}
    assert 1.75e9 < rows["diloco"]["up_bytes"] < 1.8e9
    assert rows["diloco"]["exchange_s"] == pytest.approx(rows["diloco"]["up_bytes"] / 2.5e6, rel=0.02)
    assert rows["data_parallel"]["up_ratio"] == pytest.approx(1)
    assert rows["streaming"]["utilisation_overlapped"] > rows["streaming"]["utilisation_waiting"]
    assert rows["diloco"]["utilisation_overlapped"] is None, "it has no overlap unless somebody asks"


def test_what_real_runs_can_do_stands_first_and_only_that_is_recommended(capsys: pytest.CaptureFixture[str]):
    answer = told(capsys)
    marks = [bool(row["not_yet"]) for row in answer["recipes"]]
    assert marks == sorted(marks) and marks.count(False) >= 3
    real = {row["recipe"] for row in answer["recipes"] if not row["not_yet"]}
    assert answer["recommended"]["settings"]["train.recipe"] in real


def test_the_recommended_rounds_are_as_short_as_the_links_allow(capsys: pytest.CaptureFixture[str]):
    """Links that hide a fragment behind its overlap keep the recipe's own rhythm; slow ones ask for longer rounds,
    until nine tenths are training."""
    fast = told(capsys, uplink="100Gbit", peers=4)["recommended"]
    assert fast["settings"] == {"train.recipe": "auto", "train.inner_steps": auto().schedule.inner_steps}
    slow = told(capsys, uplink="2Mbit")["recommended"]
    assert slow["settings"]["train.inner_steps"] > 100 and slow["utilisation"] == pytest.approx(0.9, abs=0.01)
    assert slow["settings"]["train.outer_momentum"] == 0.7, "eight peers' mean is less noisy"
    assert "untried" in told(capsys, uplink="100kbit")["recommended"]["reason"]


def test_adapters_are_sent_and_the_whole_model_is_computed(capsys: pytest.CaptureFixture[str]):
    """A hundredth of the values is a hundredth of the bytes; a step is 4 operations where it was 6."""
    whole, some = told(capsys), told(capsys, adapters="10M")
    share = some["recipes"][0]["up_bytes"] / whole["recipes"][0]["up_bytes"]
    assert share == pytest.approx(0.01, rel=0.02) and some["frozen"] == 990_000_000
    assert some["step_s"] / whole["step_s"] == pytest.approx(4 / 6, rel=0.01)


LLAMA = "llama:d=512,l=4,h=8,f=1024,t=256,v=4096"


def test_a_built_in_model_with_adapters_is_planned_as_its_run_would_be(capsys: pytest.CaptureFixture[str]):
    """By rank, by its name, or by what is named: what genesis would exchange, and nothing is built for it."""
    whole, by_rank = told(capsys, model=LLAMA), told(capsys, model=LLAMA, lora_rank=8)
    assert by_rank == told(capsys, model=by_rank["model"]) and by_rank["model"].endswith("lora=8")
    assert (
        by_rank["parameters"] == 4 * 8 * (4 * (512 + 512) + 3 * (512 + 1024))
        and by_rank["frozen"] == whole["parameters"]
    )
    ratio = by_rank["recipes"][0]["up_bytes"] / whole["recipes"][0]["up_bytes"]
    assert ratio == pytest.approx(by_rank["parameters"] / whole["parameters"], rel=0.02)
    assert by_rank["step_s"] / whole["step_s"] == pytest.approx(4 / 6, rel=0.05)
    blocks = told(capsys, model=LLAMA, only=("*.mlp.*",))
    assert blocks["parameters"] + blocks["frozen"] == whole["parameters"]
    assert 0.3 < blocks["parameters"] / whole["parameters"] < 0.7


def test_trust_excludes_recipes_and_adds_owners(capsys: pytest.CaptureFixture[str]):
    """Private: 2 bits both ways. Community: results in int8, no gathered rows. Open: rows travel once per owner."""
    by_trust = {t: told(capsys, trust=t) for t in ("private", "community", "open")}
    rows = {t: {row["recipe"]: row for row in answer["recipes"]} for t, answer in by_trust.items()}
    assert not rows["private"]["sparseloco"]["not_yet"]
    assert "private" in rows["community"]["sparseloco"]["not_yet"] and "private" in rows["open"]["demo_"]["not_yet"]
    up = {t: rows[t]["auto"]["up_bytes"] for t in rows}
    assert up["private"] < 0.7 * up["community"] and up["community"] < 0.9 * up["open"]
    assert [by_trust[t]["copies"] for t in by_trust] == [1, 1, 2]
    best = {t: by_trust[t]["recommended"]["settings"]["train.inner_steps"] for t in by_trust}
    assert best["private"] < best["community"] < best["open"] and all(steps % 4 == 0 for steps in best.values())
    with pytest.raises(UsageError, match=r"E-PLAN-07 .* 3 members[\s\S]*--peers 4"):
        plan(model="1B", peers=3, uplink="20Mbit", trust="open")


def test_rounds_that_do_not_fit_the_default_deadlines_are_named_with_the_settings_that_they_need(
    capsys: pytest.CaptureFixture[str],
):
    """diloco with 1 B parameters: 706 s of exchange, 50 steps of 19.7 s, so 0.6 x timeout >= 706 s - 492 s."""
    answer = told(capsys)
    rows = {row["recipe"]: row for row in answer["recipes"]}
    assert rows["auto"]["deadlines"] == {"run.first_train": 300.0}
    assert rows["diloco"]["deadlines"] == {"consensus.timeout": 480.0, "run.first_train": 2160.0}
    assert 0.6 * 480 + 983 / 2 > rows["diloco"]["exchange_s"] > 0.6 * 30 + 983 / 2
    assert answer["recommended"]["settings"]["run.first_train"] >= 300.0
    plan(model="1B", peers=8, uplink="20Mbit")
    assert "! longer than the default deadlines" in capsys.readouterr().out
    assert all(not row.get("deadlines") for row in told(capsys, model="gpt-nano", uplink="1Gbit")["recipes"])


def test_words_for_people(capsys: pytest.CaptureFixture[str]):
    plan(model="gpt:d=64,l=3,h=4,t=64", peers=4, uplink="20Mbit", step_seconds=0.013)
    text = capsys.readouterr().out
    assert text.startswith("168 k parameters, 4 peers, 2.5 MB/s up") and "* diloco" in text
    assert "recommended: train.recipe" in text and "assumed" not in text


def test_a_recipe_that_does_not_fit_is_said_so(capsys: pytest.CaptureFixture[str]):
    rows = {row["recipe"]: row for row in told(capsys, peers=2)["recipes"]}
    assert "at least 3 peers" in rows["cooperative"]["not_yet"]


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"model": "big"}, "E-PLAN-04"),
        ({"model": "gpt:d=64"}, "E-PLAN-04"),
        ({"model": LLAMA, "only": ("nothing",)}, "E-PLAN-04"),
        ({"model": "cnn", "lora_rank": 4}, "E-PLAN-04"),
        ({"lora_rank": 4}, "E-PLAN-06"),
        ({"uplink": "fast"}, "E-PLAN-02"),
        ({"peers": 1}, "E-PLAN-01"),
        ({"step_seconds": 1.0, "tokens_per_s": 5.0}, "E-PLAN-05"),
        ({"step_seconds": 0.0}, "E-PLAN-05"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_words(asked, code):
    with pytest.raises(UsageError) as why:
        plan(**{"model": "1B", "peers": 8, "uplink": "20Mbit"} | asked)
    assert why.value.code == code
