"""How loops join: with the agreed state from a published place, and not by a command that has no loop."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from shutil import copytree

import pytest
import torch
from loops import found_loop
from processes import atoll as atoll_command
from torch import nn

import atoll
from atoll.runtime.event_log import entries_in


def trained(run: atoll.Run) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    with run:
        run.attach(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
        while not run.done:
            model(torch.ones(1, 64)).square().mean().backward()
            optimizer.step()


def test_a_loop_that_joins_asks_the_published_place_first(
    tmp_path: Path, peers_in_threads: None, monkeypatch: pytest.MonkeyPatch
):
    founder = found_loop(folder=tmp_path / "founder", start_peers=2, rounds=2, inner_steps=2)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(trained, founder)]
        while not founder.ticket and not ends[0].done():
            wait(ends, 0.02)
        copytree(tmp_path / "founder" / "blobs", tmp_path / "place" / "states")  # as `atoll publish` names them
        monkeypatch.setenv("ATOLL_STATE_FROM", str(tmp_path / "place"))
        ends.append(pool.submit(trained, atoll.join(founder.ticket, folder=tmp_path / "late")))
        for end in ends:
            end.result()
    facts = [entry["fact"] for entry in entries_in(tmp_path / "late" / "facts.jsonl")]
    assert facts.count("PublishedStateFetched") == 1 and "RunOver" in facts


def test_atoll_join_is_refused_at_once_where_members_train_in_their_own_programs(
    tmp_path: Path, peers_in_threads: None
):
    """It does not become a member before it is refused: only the second loop joins."""
    founder = found_loop(folder=tmp_path / "founder", start_peers=2, rounds=1, inner_steps=1)
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(trained, founder)
        while not founder.ticket and not end.done():
            wait([end], 0.02)
        told = atoll_command("join", founder.ticket, "--dir", str(tmp_path / "other"))
        assert told.returncode == 4 and "E-JOIN-07 members of this run train a model in their own" in told.stderr
        with atoll.join(founder.ticket, folder=tmp_path / "second") as second:
            trained(second)
        end.result()
    entries = list(entries_in(tmp_path / "founder" / "facts.jsonl"))
    joined = [peer for entry in entries if entry["fact"] == "MembershipChanged" for peer in entry["joined"]]
    assert len(joined) == 1, "the refused peer was a member"


def test_atoll_up_does_not_take_the_place_of_a_loop(
    tmp_path: Path, peers_in_threads: None, monkeypatch: pytest.MonkeyPatch
):
    """The loop of this folder has ended, the run has not: the error names the program before the peer begins, so
    no round is used up and no other member sees it come and go."""
    folder = tmp_path / "founder"
    monkeypatch.setenv("ATOLL_NAME", "zoe")
    with found_loop(folder=folder, rounds=30, inner_steps=1) as run:
        model = nn.Linear(64, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.attach(model, optimizer)
        while run.trained < 2:
            model(torch.ones(1, 64)).square().mean().backward()
            optimizer.step()
    entries = list(entries_in(folder / "facts.jsonl"))
    for command in (["up"], ["join", run.ticket]):
        told = atoll_command(*command, "--dir", str(folder))
        assert told.returncode == 4 and "start the program that trained in this folder" in told.stderr
    assert list(entries_in(folder / "facts.jsonl")) == entries, "the peer began"
    assert "zoe" in str([entry["members"] for entry in entries if entry["fact"] == "GenesisKnown"])


def test_a_wrong_place_is_told_before_a_loop_joins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("ATOLL_STATE_FROM", "ftp://host/x")
    monkeypatch.setattr("atoll.runtime.embed.api.parse", lambda ticket: None)
    with pytest.raises(atoll.UsageError, match="E-PUB-02 ftp://host/x is no place"):
        atoll.join("ATOLL1:", folder=tmp_path)
